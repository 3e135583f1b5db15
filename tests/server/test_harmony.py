"""gpt-oss through all three APIs with the stock clients: a scripted engine writes harmony, read whole and streamed.

Channel `analysis` is reasoning, `commentary` to a function is a call and to no one is text, `final` is text.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import anthropic
import msgspec
import openai
import pytest

from mini_sglang.text.notations import HARMONY, HARMONY_THINK
from mini_sglang.text.template_format import format_of
from mini_sglang.text.tokenizer import Tokenizer
from tests.server.answers.test_forced_calls import with_marks
from tests.server.conftest import ScriptedEngine

# Writes as gpt-oss's does, in short: it knows of one call for each message, and calls reasoning `thinking`.
TEMPLATE = """\
{%- for tool in tools or [] %}{{ "type " + tool.function.name + " = (_: " + tool.function.parameters | tojson + ")\n" }}
{%- endfor %}
{%- set called = namespace(name=none) %}
{%- for message in messages %}
{%- if message.tool_calls %}
{%- if message.content and message.thinking %}{{ raise_exception("Cannot pass both content and thinking") }}{% endif %}
{%- set thought = message.thinking or message.content %}
{%- if thought %}{{ "<|start|>assistant<|channel|>analysis<|message|>" + thought + "<|end|>" }}{% endif %}
{%- set call = message.tool_calls[0].function %}
{{- "<|start|>assistant to=functions." + call.name + "<|channel|>commentary json<|message|>" }}
{{- call.arguments | tojson + "<|call|>" }}
{%- set called.name = call.name %}
{%- elif message.role == "assistant" %}
{{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|end|>" }}
{%- elif message.role == "tool" %}
{{- "<|start|>functions." + called.name + " to=assistant<|channel|>commentary<|message|>" }}
{{- message.content | tojson + "<|end|>" }}
{%- else %}{{ "<|start|>" + message.role + "<|message|>" + message.content + "<|end|>" }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""

ZONE = {"type": "object", "properties": {"zone": {"type": "string"}}, "required": ["zone"]}
GET_TIME = {"name": "get_time", "description": "The time in a zone.", "parameters": ZONE}
QUESTION = "What time is it in Lima?"

Read = list[tuple[str, ...]]


def thought(text: str) -> str:
    return f"<|start|>assistant<|channel|>analysis<|message|>{text}<|end|>"


def preamble(text: str) -> str:
    return f"<|start|>assistant<|channel|>commentary<|message|>{text}<|end|>"


def call(zone: str) -> str:
    arguments = f'<|constrain|>json<|message|>{{"zone": "{zone}"}}<|call|>'
    return f"<|start|>assistant<|channel|>commentary to=functions.get_time {arguments}"


def last(text: str) -> str:
    return f"<|start|>assistant<|channel|>final<|message|>{text}<|return|>"


def answer(*messages: str) -> str:
    """What the model writes: the prompt has begun the first message."""
    return "".join(messages).removeprefix("<|start|>assistant")


class Said(NamedTuple):
    """What a client was told: parts in their order, why the answer ended, and its reasoning tokens."""

    parts: Read
    reason: str | None
    reasoning_tokens: int | None


class Clients:
    """Asks one server through each API, whole and streamed, which must say the same."""

    def __init__(self, url: str) -> None:
        settings: Any = {"api_key": "none", "max_retries": 0, "timeout": 20}
        self.openai = openai.OpenAI(base_url=f"{url}/v1", **settings)
        self.anthropic = anthropic.Anthropic(base_url=url, **settings)

    def chat(self, **fields: Any) -> Said:
        """Parts of a chat are all reasoning, all text and then the calls: the API tells no order among them."""
        tools = [{"type": "function", "function": GET_TIME}]
        body: Any = {"model": "scripted", "messages": [{"role": "user", "content": QUESTION}], "tools": tools}
        body |= {"max_tokens": 300, **fields}
        whole = self.openai.chat.completions.create(**body)
        [choice] = whole.choices
        said = _chat_said(choice.message, choice.finish_reason, whole.usage)
        with self.openai.chat.completions.stream(**body, stream_options={"include_usage": True}) as stream:
            try:
                final: Any = stream.get_final_completion()
            except openai.LengthFinishReasonError as error:
                final = error.completion
        [choice] = final.choices
        assert _chat_said(choice.message, choice.finish_reason, final.usage) == said
        return said

    def responses(self, **fields: Any) -> Said:
        tools = [{"type": "function", **GET_TIME, "strict": False}]
        body: Any = {"model": "scripted", "input": QUESTION, "tools": tools, "max_output_tokens": 300, **fields}
        said = _response_said(self.openai.responses.create(**body))
        *_, final = self.openai.responses.create(**body, stream=True)
        assert _response_said(final.response) == said
        return said

    def messages(self, **fields: Any) -> Said:
        tools = [{"name": "get_time", "description": "The time in a zone.", "input_schema": ZONE}]
        body: Any = {"model": "scripted", "messages": [{"role": "user", "content": QUESTION}], "tools": tools}
        body |= {"max_tokens": 300, **fields}
        said = _message_said(self.anthropic.messages.create(**body))
        with self.anthropic.messages.stream(**body) as stream:
            assert _message_said(stream.get_final_message()) == said
        return said


def _chat_said(message: Any, reason: str, usage: Any) -> Said:
    reasoning = getattr(message, "reasoning_content", None)
    parts: Read = [("reasoning", reasoning)] if reasoning else []
    parts += [("text", message.content)] if message.content else []
    parts += [("call", each.function.name, each.function.arguments) for each in message.tool_calls or ()]
    return Said(parts, reason, usage.completion_tokens_details.reasoning_tokens)


def _response_said(response: Any) -> Said:
    parts: Read = []
    for item in response.output:
        match item.type:
            case "reasoning":
                parts.append(("reasoning", item.content[0].text))
            case "message":
                parts.append(("text", item.content[0].text))
            case _:
                parts.append(("call", item.name, item.arguments))
    return Said(parts, response.status, response.usage.output_tokens_details.reasoning_tokens)


def _message_said(message: Any) -> Said:
    parts: Read = []
    for block in message.content:
        match block.type:
            case "thinking":
                parts.append(("reasoning", block.thinking))
            case "text":
                parts.append(("text", block.text))
            case _:
                parts.append(("call", block.name, json.dumps(block.input)))
    return Said(parts, message.stop_reason, None)


@pytest.fixture(params=["special tokens", "plain text"])
def tokenizer(request: pytest.FixtureRequest, with_template: Callable[[str], Tokenizer]) -> Tokenizer:
    """The built-in model's with harmony's template; its marks are special tokens, as gpt-oss's are, or plain text."""
    marks = (*HARMONY.markers, *HARMONY_THINK.markers, "<|return|>")
    made = with_template(TEMPLATE)
    return with_marks(made, marks) if request.param == "special tokens" else made


@pytest.fixture
def clients(engine: ScriptedEngine, serve: Callable[..., str], tokenizer: Tokenizer) -> Clients:
    engine.tokenizer = tokenizer
    engine.info = msgspec.structs.replace(engine.info, vocab_size=tokenizer.vocab_size)
    return Clients(serve(tokenizer=tokenizer))


@pytest.fixture
def write(engine: ScriptedEngine, clients: Clients) -> Callable[..., None]:
    """`write(message, …)` → the engine answers with these from now on."""

    def write(*messages: str) -> None:
        engine.tokens = [*engine.tokenizer.encode(answer(*messages)), engine.eos]

    return write


Write = Callable[..., None]
TIME = ("call", "get_time", '{"zone": "Lima"}')


def test_the_template_shows_harmony(tokenizer: Tokenizer) -> None:
    form = format_of(tokenizer)
    assert (form.notation, form.thoughts) == (HARMONY, HARMONY_THINK)
    assert form.writes_tools
    assert form.writes_calls
    assert form.writes_results


def test_thoughts_and_an_answer(clients: Clients, write: Write, engine: ScriptedEngine) -> None:
    written = [thought("Two and two make four."), last("It is 4.")]
    write(*written)
    parts = [("reasoning", "Two and two make four."), ("text", "It is 4.")]
    reasoning_tokens = len(engine.tokenizer.encode(answer(written[0])))
    chat = clients.chat()
    assert chat[:2] == (parts, "stop")
    assert abs((chat.reasoning_tokens or 0) - reasoning_tokens) <= 1
    assert clients.responses() == (parts, "completed", chat.reasoning_tokens)
    assert clients.messages()[:2] == (parts, "end_turn")


def test_thoughts_a_preamble_and_a_call(clients: Clients, write: Write) -> None:
    write(thought("I need the time."), preamble("Let me look."), call("Lima"))
    parts = [("reasoning", "I need the time."), ("text", "Let me look."), TIME]
    assert clients.chat()[:2] == (parts, "tool_calls")
    assert clients.responses()[:2] == (parts, "completed")
    assert clients.messages()[:2] == (parts, "tool_use")


def test_a_call_alone_has_no_reasoning_tokens(clients: Clients, write: Write) -> None:
    write(call("Lima"))
    assert clients.chat() == ([TIME], "tool_calls", 0)
    assert clients.responses() == ([TIME], "completed", 0)
    assert clients.messages()[:2] == ([TIME], "tool_use")


def test_two_calls_in_a_row(clients: Clients, write: Write) -> None:
    write(call("Lima"), call("Quito"))
    calls = [TIME, ("call", "get_time", '{"zone": "Quito"}')]
    assert clients.chat()[:2] == (calls, "tool_calls")
    assert clients.responses()[:2] == (calls, "completed")
    assert clients.messages()[:2] == (calls, "tool_use")
    assert clients.chat(parallel_tool_calls=False)[:2] == ([TIME], "tool_calls")


def test_thoughts_between_texts_keep_their_place(clients: Clients, write: Write, engine: ScriptedEngine) -> None:
    written = [thought("First."), preamble("One."), thought("Then."), call("Lima"), thought("Last."), last("Two.")]
    write(*written)
    parts = [
        *[("reasoning", "First."), ("text", "One."), ("reasoning", "\nThen.")],
        *[TIME, ("reasoning", "\nLast."), ("text", "\nTwo.")],
    ]
    assert clients.messages()[:2] == (parts, "tool_use")
    assert clients.responses()[:2] == (parts, "completed")
    chat = clients.chat()
    together = [("reasoning", "First.\nThen.\nLast."), ("text", "One.\nTwo."), TIME]
    assert chat[:2] == (together, "tool_calls")
    assert chat.reasoning_tokens == clients.responses().reasoning_tokens
    thoughts = [answer(text) for text in written if "analysis" in text]  # without what begins any message
    num_tokens = sum(len(engine.tokenizer.encode(text)) for text in thoughts)
    assert abs((chat.reasoning_tokens or 0) - num_tokens) <= len(thoughts)


def test_two_thoughts_in_a_row_are_one_block(clients: Clients, write: Write) -> None:
    write(thought("First."), thought("Then."), last("Done."))
    parts = [("reasoning", "First.\nThen."), ("text", "Done.")]
    assert clients.chat()[:2] == (parts, "stop")
    assert clients.responses()[:2] == (parts, "completed")
    assert clients.messages()[:2] == (parts, "end_turn")


def test_a_preamble_and_an_answer_are_two_lines(clients: Clients, write: Write) -> None:
    write(preamble("Let me think."), last("Done."))
    assert clients.chat()[:2] == ([("text", "Let me think.\nDone.")], "stop")
    assert clients.messages()[:2] == ([("text", "Let me think.\nDone.")], "end_turn")
    write(preamble("Let me think."), thought("Hm."), last("Done."))
    assert clients.chat()[:2] == ([("reasoning", "Hm."), ("text", "Let me think.\nDone.")], "stop")


def test_a_call_and_then_text(clients: Clients, write: Write) -> None:
    write(thought("I need it."), call("Lima"), last("I have asked."))
    parts = [("reasoning", "I need it."), TIME, ("text", "I have asked.")]
    assert clients.messages()[:2] == (parts, "tool_use")
    assert clients.responses()[:2] == (parts, "completed")


def test_an_end_within_a_thought(clients: Clients, write: Write) -> None:
    write(thought("Two and two make four, and so on and on, for as long as there are numbers left to add."))
    chat = clients.chat(max_tokens=24)
    [(kind, text)] = chat.parts
    assert kind == "reasoning"
    assert text.startswith("Two and two")
    assert (chat.reason, chat.reasoning_tokens) == ("length", 24)
    assert clients.responses(max_output_tokens=24) == (chat.parts, "incomplete", 24)
    assert clients.messages(max_tokens=24)[:2] == (chat.parts, "max_tokens")


def test_what_is_meant_for_no_function_that_is_offered_is_not_shown(clients: Clients, write: Write) -> None:
    python = "<|start|>assistant<|channel|>commentary to=python code<|message|>print(5)<|call|>"
    write(thought("Hm."), python, last("Five."))
    assert clients.chat()[:2] == ([("reasoning", "Hm."), ("text", "Five.")], "stop")
    assert clients.messages()[:2] == ([("reasoning", "Hm."), ("text", "Five.")], "end_turn")


def test_options_name_the_parsers(
    engine: ScriptedEngine, serve: Callable[..., str], with_template: Callable[[str], Tokenizer]
) -> None:
    plain = with_template("{% for message in messages %}{{ message.content }}{% endfor %}<|start|>assistant")
    engine.tokenizer = plain
    engine.tokens = [*plain.encode(answer(thought("I need the time."), call("Lima"))), engine.eos]
    named = Clients(serve(tokenizer=plain, tool_call_parser="openai", reasoning_parser="openai_gptoss"))
    assert named.chat()[:2] == ([("reasoning", "I need the time."), TIME], "tool_calls")


# -- histories --------------------------------------------------------------------------------------------------------


def prompt(engine: ScriptedEngine) -> str:
    return engine.tokenizer.decode(engine.calls[-1].prompt_ids, skip_special_tokens=False)


ASKED = f"<|start|>user<|message|>{QUESTION}<|end|>"
CALLED = '<|start|>assistant to=functions.get_time<|channel|>commentary json<|message|>{"zone": "Lima"}<|call|>'
RESULT = '<|start|>functions.get_time to=assistant<|channel|>commentary<|message|>"09:30"<|end|>'


def test_the_model_sees_the_thoughts_that_led_to_a_call(clients: Clients, write: Write, engine: ScriptedEngine) -> None:
    write(thought("I need the time."), call("Lima"))
    expected = f"{ASKED}{thought('I need the time.')}{CALLED}{RESULT}<|start|>assistant"

    tools: Any = [{"type": "function", "function": GET_TIME}]
    asked: Any = {"role": "user", "content": QUESTION}
    message = clients.openai.chat.completions.create(model="scripted", messages=[asked], tools=tools).choices[0].message
    assert message.tool_calls
    result: Any = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "09:30"}
    sent_back: Any = message.model_dump(exclude_none=True)
    clients.chat(messages=[asked, sent_back, result])
    assert prompt(engine).endswith(expected)

    response = clients.openai.responses.create(
        model="scripted",
        input=QUESTION,
        tools=[{"type": "function", **GET_TIME, "strict": False}],  # type: ignore[list-item]
    )
    output = {"type": "function_call_output", "call_id": response.output[-1].call_id, "output": "09:30"}  # type: ignore[union-attr]
    clients.responses(input=[asked, *(item.model_dump() for item in response.output), output])
    assert prompt(engine).endswith(expected)

    tools = [{"name": "get_time", "description": "The time in a zone.", "input_schema": ZONE}]
    said = clients.anthropic.messages.create(model="scripted", max_tokens=300, messages=[asked], tools=tools)
    result = {"type": "tool_result", "tool_use_id": said.content[-1].id, "content": "09:30"}  # type: ignore[union-attr]
    blocks = [block.model_dump() for block in said.content]
    history: Any = [asked, {"role": "assistant", "content": blocks}, {"role": "user", "content": [result]}]
    clients.messages(messages=history)
    assert prompt(engine).endswith(expected)


def test_calls_that_were_made_together_are_told_one_by_one_each_with_its_result(
    clients: Clients, engine: ScriptedEngine
) -> None:
    calls = [
        {"id": f"c{zone}", "type": "function", "function": {"name": "get_time", "arguments": f'{{"zone": "{zone}"}}'}}
        for zone in ("Lima", "Quito")
    ]
    results = [
        {"role": "tool", "tool_call_id": "cQuito", "content": "10:30"},
        {"role": "tool", "tool_call_id": "cLima", "content": "09:30"},
    ]
    called = {"role": "assistant", "content": "Let me look.", "reasoning_content": "Both.", "tool_calls": calls}
    clients.chat(messages=[{"role": "user", "content": QUESTION}, called, *results])
    assert prompt(engine).endswith(
        f"{ASKED}{thought('Both.' + chr(10) + 'Let me look.')}{CALLED}{RESULT}"
        f"{CALLED.replace('Lima', 'Quito')}{RESULT.replace('09', '10')}<|start|>assistant"
    )


def test_an_answer_of_an_earlier_turn_is_told_as_final(clients: Clients, engine: ScriptedEngine) -> None:
    asked = {"role": "user", "content": QUESTION}
    said = {"role": "assistant", "content": "Half past nine.", "reasoning_content": "I know."}
    clients.chat(messages=[asked, said, asked])
    final = "<|start|>assistant<|channel|>final<|message|>Half past nine.<|end|>"
    assert prompt(engine).endswith(f"{ASKED}{final}{ASKED}<|start|>assistant")
