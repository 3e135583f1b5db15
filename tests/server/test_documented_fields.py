"""The tables of docs/api.md are true: what is supported has an effect, what is refused is refused by name.

Every field of a table has an example here, so a row that is added to the document needs one too.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from tests.server.conftest import ScriptedEngine

Json = dict[str, Any]

DOCUMENT = Path(__file__).parents[2] / "docs" / "api.md"
ROUTES = {
    "Tool calls": "/v1/chat/completions",
    "Reasoning": "/v1/chat/completions",
    "Chat completions and completions": "/v1/chat/completions",
    "Responses": "/v1/responses",
    "Anthropic's messages": "/v1/messages",
    "/generate": "/generate",
}
HI = [{"role": "user", "content": "Hi"}]
BASES: dict[str, Json] = {
    "/v1/chat/completions": {"messages": HI},
    "/v1/completions": {"prompt": "Hi"},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"messages": HI, "max_tokens": 64},
    "/generate": {"text": "Hi"},
}
FUNCTION = {"name": "f", "parameters": {"type": "object"}}
GET_TIME = {"type": "function", "function": FUNCTION}
STRICT = {"type": "function", "function": {**FUNCTION, "strict": True}}
CALLED = {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": {}}}]}
REASONING = {"role": "assistant", "content": "No.", "reasoning": "Hm."}
TEMPLATE = (  # shows all that a template can be given
    "{{ tools }}{{ enable_thinking }}{{ reasoning_effort }}{% for message in messages %}<|im_start|>{{ message.role }}"
    "{{ message.tool_calls }}{{ message.reasoning_content }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
# By section and field, the fields that ask for something: sent with those of "with" and compared with them alone.
EXAMPLES: dict[str, dict[str, Json]] = {
    "Tool calls": {
        "tools": {"tools": [GET_TIME]},
        "tool_choice": {"tool_choice": "required", "with": {"tools": [GET_TIME]}},
        "parallel_tool_calls": {
            "parallel_tool_calls": False,
            "with": {"tools": [GET_TIME], "tool_choice": "required"},
        },
        "function.strict": {"tools": [STRICT], "with": {"tools": [GET_TIME]}},
        "tool": {"messages": [*HI, CALLED, {"role": "tool", "tool_call_id": "c", "content": "09:30"}]},
        "assistant": {"messages": [*HI, CALLED]},
    },
    "Reasoning": {
        "chat_template_kwargs": {"chat_template_kwargs": {"enable_thinking": False}},
        "reasoning_effort": {"reasoning_effort": "low"},
        "reasoning_content": {
            "messages": [*HI, {**REASONING, "reasoning_content": "Ah."}],
            "with": {"messages": [*HI, REASONING]},
        },
        "reasoning": {"messages": [*HI, REASONING], "with": {"messages": [*HI, {**REASONING, "reasoning": None}]}},
    },
    "Chat completions and completions": {
        "max_tokens": {"max_tokens": 3},
        "max_completion_tokens": {"max_completion_tokens": 3},
        "min_tokens": {"min_tokens": 3},
        "n": {"n": 2},
        "best_of": {"best_of": 2, "n": 2, "route": "/v1/completions"},
        "temperature": {"temperature": 0.3},
        "top_p": {"top_p": 0.3},
        "top_k": {"top_k": 3},
        "min_p": {"min_p": 0.3},
        "presence_penalty": {"presence_penalty": 0.3},
        "frequency_penalty": {"frequency_penalty": 0.3},
        "repetition_penalty": {"repetition_penalty": 1.3},
        "logit_bias": {"logit_bias": {"5": 3}},
        "allowed_token_ids": {"allowed_token_ids": [5]},
        "seed": {"seed": 3},
        "stop": {"stop": ","},
        "stop_token_ids": {"stop_token_ids": [5]},
        "include_stop_str_in_output": {"include_stop_str_in_output": True},
        "no_stop_trim": {"no_stop_trim": True},
        "ignore_eos": {"ignore_eos": True, "max_tokens": 9, "with": {"max_tokens": 9}},
        "skip_special_tokens": {"skip_special_tokens": False},
        "logprobs": {"logprobs": True},
        "top_logprobs": {"logprobs": True, "top_logprobs": 2, "with": {"logprobs": True}},
        "echo": {"echo": True, "route": "/v1/completions"},
        "stream": {"stream": True},
        "stream_options.include_usage": {"stream_options": {"include_usage": True}, "with": {"stream": True}},
        "stream_options.continuous_usage_stats": {
            "stream_options": {"continuous_usage_stats": True},
            "with": {"stream": True},
        },
        "response_format": {"response_format": {"type": "json_object"}},
        "structured_outputs": {"structured_outputs": {"choice": ["a", "b"]}},
        "regex": {"regex": "a+"},
        "ebnf": {"ebnf": 'root ::= "a"'},
        "choice": {"choice": ["a", "b"]},
        "continue_final_message": {"continue_final_message": True},
        "add_generation_prompt": {"add_generation_prompt": False},
        "cache_salt": {"cache_salt": "x"},
        "priority": {"priority": 3},
        "user": {"user": "x"},
        "safety_identifier": {"safety_identifier": "x"},
        "prompt_cache_key": {"prompt_cache_key": "x"},
        "metadata": {"metadata": {"a": "b"}},
        "service_tier": {"service_tier": "flex"},
        "verbosity": {"verbosity": "low"},
        "separate_reasoning": {"separate_reasoning": False},
        "stream_reasoning": {"stream_reasoning": False},
        "return_hidden_states": {"return_hidden_states": True},
        "suffix": {"suffix": "x", "route": "/v1/completions"},
        "functions": {"functions": [{"name": "f"}]},
        "function_call": {"function_call": {"name": "f"}},
        "audio": {"audio": {"voice": "x"}},
        "prediction": {"prediction": {"type": "content", "content": "x"}},
        "modalities": {"modalities": ["text", "audio"]},
        "store: true": {"store": True},
        "web_search_options": {"web_search_options": {}},
    },
    "Responses": {
        "input": {"input": [{"role": "user", "content": "Hello"}, CALL]},
        "instructions": {"instructions": "Be short."},
        "max_output_tokens": {"max_output_tokens": 3},
        "tools": {"tools": [{"type": "function", "name": "f"}]},
        "tool_choice": {
            "tool_choice": "required",
            "with": {"tools": [{"type": "function", "name": "f"}]},
        },
        "parallel_tool_calls": {
            "parallel_tool_calls": False,
            "with": {"tools": [{"type": "function", "name": "f"}], "tool_choice": "required"},
        },
        "text.format": {"text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}},
        "reasoning.effort": {"reasoning": {"effort": "low"}},
        "top_logprobs": {"top_logprobs": 2},
        'include: ["message.output_text.logprobs"]': {"include": ["message.output_text.logprobs"]},
        "temperature": {"temperature": 0.3},
        "top_p": {"top_p": 0.3},
        "user": {"user": "x"},
        "metadata": {"metadata": {"a": "b"}},
        "safety_identifier": {"safety_identifier": "x"},
        "prompt_cache_key": {"prompt_cache_key": "x"},
        "prompt_cache_retention": {"prompt_cache_retention": "24h"},
        "store: true": {"store": True},
        "previous_response_id": {"previous_response_id": "x"},
        "conversation": {"conversation": "x"},
        "background": {"background": True},
        "prompt": {"prompt": {"id": "x"}},
        'truncation: "auto"': {"truncation": "auto"},
        "max_tool_calls": {"max_tool_calls": 1},
    },
    "Anthropic's messages": {
        "messages": {"messages": [*HI, {"role": "assistant", "content": "And"}]},
        "system": {"system": [{"type": "text", "text": "Be short."}]},
        "max_tokens": {"max_tokens": 3},
        "stop_sequences": {"stop_sequences": [","]},
        "temperature": {"temperature": 0.3},
        "top_p": {"top_p": 0.3},
        "top_k": {"top_k": 3},
        "tools": {"tools": [{"name": "f", "input_schema": {"type": "object"}}]},
        "tool_choice": {
            "tool_choice": {"type": "any"},
            "with": {"tools": [{"name": "f", "input_schema": {"type": "object"}}]},
        },
        "thinking": {"thinking": {"type": "adaptive"}},
        "output_config.format": {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
        "metadata.user_id": {"metadata": {"user_id": "x"}},
        "cache_control": {"cache_control": {"type": "ephemeral"}},
        "container": {"container": "x"},
        "mcp_servers": {"mcp_servers": [{"name": "x"}]},
        "output_config.effort": {"output_config": {"effort": "low"}},
        "context_management": {"context_management": {"edits": []}},
        "inference_geo": {"inference_geo": "eu"},
    },
    "/generate": {
        "text": {"text": "Hello"},
        "input_ids": {"input_ids": [5, 6], "text": None},
        "sampling_params": {"sampling_params": {"max_new_tokens": 3}},
        "return_logprob": {"return_logprob": True},
        "top_logprobs_num": {"top_logprobs_num": 2, "with": {"return_logprob": True}},
        "return_text_in_logprobs": {"return_text_in_logprobs": True, "with": {"return_logprob": True}},
        "logprob_start_len": {"logprob_start_len": 0, "with": {"return_logprob": True}},
        "stream": {"stream": True},
        "rid": {"rid": "mine"},
        "cache_salt": {"cache_salt": "x"},
        "priority": {"priority": 3},
        "log_metrics": {"log_metrics": True},
        "no_logs": {"no_logs": True},
        "sampling_params (list)": {"sampling_params": [{}]},
        "rid (list)": {"rid": ["a"]},
        "image_data": {"image_data": "x"},
        "input_embeds": {"input_embeds": [[0.5]]},
        "lora_path": {"lora_path": "x"},
        "session_params": {"session_params": {"id": "x"}},
        "return_hidden_states": {"return_hidden_states": True},
        "token_ids_logprob": {"token_ids_logprob": [5]},
        "return_bytes": {"return_bytes": True},
        "return_entropy": {"return_entropy": True},
    },
}
SAMPLING = {  # `sampling_params` of /generate, which a cell of the table lists
    "max_new_tokens": 3,
    "min_new_tokens": 3,
    "n": 2,
    "temperature": 0.3,
    "top_p": 0.3,
    "top_k": 3,
    "min_p": 0.3,
    "frequency_penalty": 0.3,
    "presence_penalty": 0.3,
    "repetition_penalty": 1.3,
    "sampling_seed": 3,
    "stop": ",",
    "stop_token_ids": [5],
    "no_stop_trim": True,
    "ignore_eos": True,
    "skip_special_tokens": False,
    "logit_bias": {"5": 3},
    "json_schema": "{}",
    "regex": "a+",
    "ebnf": 'root ::= "a"',
}


def rows(section: str) -> list[tuple[list[str], str]]:
    """The fields and the effect of each row of a section's first table."""
    text = DOCUMENT.read_text().split(f"\n## {section}\n", 1)[1].split("\n## ", 1)[0]
    table = text[text.index("\n|") :].strip().split("\n\n", 1)[0]
    cells = [line.strip("|").split(" | ") for line in table.splitlines()[2:]]
    return [(re.findall(r"`[^`]+`(?: \(list\))?", first), second.strip()) for first, second in cells]


@pytest.fixture
def client(make_app: Callable[..., FastAPI], with_template: Callable[[str], Any]) -> TestClient:
    return TestClient(make_app(with_template(TEMPLATE), tool_call_parser="hermes"))


CASES = [
    (section, name.replace("`", ""), effect) for section in ROUTES for names, effect in rows(section) for name in names
]


def outcome(client: TestClient, engine: ScriptedEngine, route: str, fields: Json) -> Any:
    """What a request asked of the engine, and what came of it, without what is different each time.

    Of /v1/responses only the former: its answers repeat what they were asked.
    """
    engine.calls.clear()
    body = {name: value for name, value in {**BASES[route], **fields}.items() if value is not None}
    response = client.post(route, json=body)
    assert response.status_code == 200, response.text
    answer = re.sub(r'"id":"[^"]*"|"created":\d+', "", response.text) if route != "/v1/responses" else ""
    if isinstance(fields.get("rid"), str):
        answer += engine.calls[0].request_id
    return [call[1:] for call in engine.calls], answer


@pytest.mark.parametrize(("section", "name", "effect"), CASES)
def test_the_table_says_what_happens(
    client: TestClient, engine: ScriptedEngine, section: str, name: str, effect: str
) -> None:
    fields = dict(EXAMPLES[section][name])
    route, base = fields.pop("route", ROUTES[section]), fields.pop("with", {})
    if effect.startswith("refused"):
        response = client.post(route, json={**BASES[route], **base, **fields})
        assert response.status_code == 400, response.text
        field = re.split(r"[.:( ]", name)[0]
        error = response.json()["error"]
        assert field in (error["message"] if section == "Anthropic's messages" else error["param"])
        return
    with_it, without = outcome(client, engine, route, {**base, **fields}), outcome(client, engine, route, base)
    changes_nothing = with_it == without
    assert changes_nothing == effect.startswith("accepted")


def test_the_sampling_parameters_of_generate_are_listed(client: TestClient, engine: ScriptedEngine) -> None:
    [effect] = [effect for names, effect in rows("/generate") if names == ["`sampling_params`"]]
    assert {"max_new_tokens"} <= set(re.findall(r"`([^`]+)`", effect)) <= set(SAMPLING)
    without = outcome(client, engine, "/generate", {})
    for name, value in SAMPLING.items():
        assert outcome(client, engine, "/generate", {"sampling_params": {name: value}}) != without, name


def test_no_example_is_left_over() -> None:
    for section, examples in EXAMPLES.items():
        assert sorted(examples) == sorted(name for of, name, _ in CASES if of == section)
