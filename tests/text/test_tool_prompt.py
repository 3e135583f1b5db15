"""Tools in words, for models whose template does not know them, and the prompts that `LLM` and server make of tools."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import httpx
import pytest

from mini_sglang import LLM, SamplingParams
from mini_sglang.text.notation import Notation
from mini_sglang.text.notations import HERMES, LLAMA3, MISTRAL
from mini_sglang.text.template_format import TemplateFormat, format_of
from mini_sglang.text.tokenizer import Tokenizer
from mini_sglang.text.tool_prompt import render_chat, with_plain_tools
from tests import tiny
from tests.server.test_chat_tools import LLAMA, QWEN
from tests.server.test_chat_tools import MISTRAL as MISTRAL_TEMPLATE

ONE_TOKEN = SamplingParams(temperature=0, max_tokens=1)
QUESTION = {"role": "user", "content": "What time is it?"}
ADD = {"type": "function", "function": {"name": "add"}}


PLAIN = TemplateFormat(HERMES, None, writes_tools=False, writes_calls=False, writes_results=False)


def test_a_conversation_without_tools_is_left_as_it_is() -> None:
    assert with_plain_tools([QUESTION], [], PLAIN) == [QUESTION]


def test_tools_are_described_ahead_of_the_conversation() -> None:
    system, question = with_plain_tools([QUESTION], [{"type": "function", "function": {"name": "add"}}], PLAIN)
    assert question == QUESTION
    assert system["role"] == "system"
    assert '{"name": "add"}' in system["content"]


def test_the_system_message_that_is_there_goes_first() -> None:
    [system, _] = with_plain_tools([{"role": "system", "content": "Be brief."}, QUESTION], [ADD], PLAIN)
    assert system["content"].startswith("Be brief.\n\n")


@pytest.mark.parametrize(("template", "notation"), [(QWEN, HERMES), (LLAMA, LLAMA3), (MISTRAL_TEMPLATE, MISTRAL)])
def test_a_template_shows_how_calls_are_written(
    builtin_tokenizer: Tokenizer, template: str, notation: Notation
) -> None:
    form = format_of(tiny.with_template(builtin_tokenizer, template))
    assert form.notation == notation
    assert form.writes_tools


def test_a_template_without_tools_is_told_of_them_in_hermes(builtin_tokenizer: Tokenizer) -> None:
    form = format_of(tiny.with_template(builtin_tokenizer, "{{ messages }}"))
    assert form.notation == HERMES
    assert not form.writes_tools


def test_a_template_that_knows_tools_and_shows_no_notation_has_none(builtin_tokenizer: Tokenizer) -> None:
    assert format_of(tiny.with_template(builtin_tokenizer, "{{ tools }}")).notation is None


def test_the_callers_messages_keep_their_ids(builtin_tokenizer: Tokenizer) -> None:
    messages = [QUESTION, {"role": "tool", "content": "3", "tool_call_id": "call_123456"}]
    tokenizer = tiny.with_template(builtin_tokenizer, MISTRAL_TEMPLATE)
    assert "call_123456" not in tokenizer.decode(render_chat(tokenizer, messages, [], format_of(tokenizer)))
    assert messages[1]["tool_call_id"] == "call_123456"


def test_a_templates_argument_may_have_any_name(builtin_tokenizer: Tokenizer) -> None:
    tokenizer = tiny.with_template(builtin_tokenizer, "{{ syntax }}")
    assert tokenizer.decode(render_chat(tokenizer, [QUESTION], [], format_of(tokenizer), syntax="mine")) == "mine"


# -- LLM and server ---------------------------------------------------------------------------------------------------

GET_TIME = {
    "type": "function",
    "function": {
        "parameters": {"type": "object", "properties": {"zone": {"type": "string", "enum": ["Lima", "Zürich"]}}},
        "strict": True,
        "description": "The time.",
        "name": "get_time",
    },
    "cache_control": {"type": "ephemeral"},
}
CALL = {"id": "call_123", "type": "function", "function": {"name": "get_time", "arguments": '{"zone": "Lima"}'}}
NO_JSON = {"id": "call_4", "type": "function", "function": {"name": "add", "arguments": '{"a": NaN}'}}
HISTORY = [
    {"role": "developer", "content": [{"type": "text", "text": "Be brief."}]},
    QUESTION,
    {"role": "assistant", "content": None, "tool_calls": [CALL, NO_JSON]},
    {"role": "tool", "tool_call_id": "call_123", "content": "noon"},
    {"role": "tool", "tool_call_id": "call_4", "content": [{"type": "text", "text": "no number"}]},
    {"role": "assistant", "content": "It is noon.", "tool_calls": [CALL], "reasoning": "Hm."},
    {"role": "tool", "tool_call_id": "call_123", "content": "noon"},
    {"role": "assistant", "content": None, "refusal": "No."},
    {"role": "assistant", "content": [{"type": "refusal", "refusal": "Never."}]},
    QUESTION,
]
BODIES: dict[str, dict[str, Any]] = {
    "no tools": {"messages": [QUESTION]},
    "empty tools": {"messages": [QUESTION], "tools": []},
    "tools": {"messages": [QUESTION], "tools": [GET_TIME, ADD]},
    "a vendor's tool": {"messages": [QUESTION], "tools": [{"type": "web_search"}, ADD]},
    "a system message": {"messages": HISTORY[:2], "tools": [ADD]},
    "calls and results": {"messages": HISTORY, "tools": [GET_TIME, ADD]},
    "calls without tools": {"messages": HISTORY},
    "an answer to go on with": {
        "messages": [*HISTORY[:5], {"role": "assistant", "content": "It is"}],
        "tools": [ADD],
        "continue_final_message": True,
    },
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
@pytest.mark.parametrize(
    "template", [None, QWEN, LLAMA, MISTRAL_TEMPLATE], ids=["built-in", "Qwen", "Llama 3", "Mistral"]
)
def test_llm_and_server_make_the_same_prompt(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, template: str | None, body: Mapping[str, Any]
) -> None:
    if template is not None:
        monkeypatch.setattr(llm, "tokenizer", tiny.with_template(llm.tokenizer, template))
    prompts: list[list[int]] = []
    add_request = llm.engine.add_request

    def note(request_id: str, prompt_ids: list[int], *arguments: Any, **others: Any) -> None:
        prompts.append(prompt_ids)
        add_request(request_id, prompt_ids, *arguments, **others)

    others = {name: value for name, value in body.items() if name != "messages"}
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine, "add_request", note)
        llm.chat(body["messages"], ONE_TOKEN, progress=False, **others)
        list(llm.stream_chat(body["messages"], ONE_TOKEN, **others))
    with tiny.serve(llm.engine, llm.tokenizer) as url:
        answer = httpx.post(f"{url}/tokenize", json=dict(body), timeout=60, verify=False)
    assert answer.status_code == 200, answer.text
    assert prompts == [answer.json()["tokens"]] * 2


def test_a_model_is_told_of_a_python_function(llm: LLM) -> None:
    def add(a: int) -> int:
        """Add one.

        Args:
            a: to this
        """
        return a + 1

    messages = [QUESTION]
    plain, told = (llm.chat(messages, ONE_TOKEN, progress=False, tools=tools)[0] for tools in ([], [add]))
    assert told.usage.prompt_tokens > plain.usage.prompt_tokens + 40
