"""Tool calls through a real server with the stock client: a scripted engine writes them, in each model's notation."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionMessageFunctionToolCall

from mini_sglang.text.tokenizer import Tokenizer
from tests.server.conftest import ScriptedEngine

# Templates that write as those of models do, in short.
QWEN = """\
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Answer with <tool_call>…</tool_call>.<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
LLAMA = QWEN.replace("<tool_call>…</tool_call>", '{"name": function name, "parameters": dictionary of argument name}')
LLAMA = LLAMA.replace("<tool_call>", "").replace("</tool_call>", "")
MISTRAL = """\
{%- for message in messages %}
{%- if message.tool_calls is defined %}[TOOL_CALLS] [
{%- for call in message.tool_calls %}
{%- if call.id | length != 9 %}{{ raise_exception("ids must have length 9") }}{% endif %}{{ call.function | tojson }}
{%- endfor %}]
{%- elif message.role == "tool" %}
{%- if message.tool_call_id | length != 9 %}{{ raise_exception("ids must have length 9") }}{% endif %}
[TOOL_RESULTS] {{ message.content }} {{ message.tool_call_id }}
{%- else %}[INST] {{ tools or "" }} {{ message.content }} [/INST]{% endif %}
{%- endfor %}"""

GET_TIME: Any = {
    "type": "function",
    "function": {
        "name": "get_time",
        "description": "The time in a zone.",
        "parameters": {"type": "object", "properties": {"zone": {"type": "string"}}, "required": ["zone"]},
    },
}
ADD: Any = {"type": "function", "function": {"name": "add"}}
TOOLS = [GET_TIME, ADD]
QUESTION: Any = [{"role": "user", "content": "What time is it in Lima?"}]
CALL = '<tool_call>\n{"name": "get_time", "arguments": {"zone": "Lima"}}\n</tool_call>'

Json = dict[str, Any]
Serve = Callable[..., openai.OpenAI]


@pytest.fixture
def start(serve: Callable[..., str], with_template: Callable[[str], Tokenizer]) -> Serve:
    """`start(template, **fields of ServerConfig)` → a client of a server whose model has this template."""

    def start(template: str = QWEN, **fields: Any) -> openai.OpenAI:
        url = serve(tokenizer=with_template(template), **fields)
        return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=20)

    return start


def plain(client: openai.OpenAI, **fields: Any) -> ChatCompletion:
    body = {"model": "scripted", "messages": QUESTION, "tools": TOOLS, "max_tokens": 200, **fields}
    answer: ChatCompletion = client.chat.completions.create(**body)
    return answer


def streamed(client: openai.OpenAI, **fields: Any) -> ChatCompletion:
    """The chunks of a stream, folded by the stock client."""
    body = {"model": "scripted", "messages": QUESTION, "tools": TOOLS, "max_tokens": 200, **fields}
    with client.chat.completions.stream(**body, stream_options={"include_usage": True}) as stream:
        try:
            return stream.get_final_completion()
        except openai.LengthFinishReasonError as error:  # how this client says that it was cut off
            return error.completion


def both_ways(client: openai.OpenAI, **fields: Any) -> tuple[str | None, list[tuple[str, Json]], str | None]:
    """Content, calls with their arguments, and reason, which must be the same plain and streamed."""
    answers = []
    for answer in (plain(client, **fields), streamed(client, **fields)):
        [choice] = answer.choices
        calls: list[tuple[str, Json]] = []
        for call in choice.message.tool_calls or ():
            assert isinstance(call, ChatCompletionMessageFunctionToolCall)
            assert call.id
            calls.append((call.function.name, json.loads(call.function.arguments)))
        answers.append((choice.message.content or None, calls, str(choice.finish_reason)))
    assert answers[0] == answers[1]
    return answers[0]


TIME = ("get_time", {"zone": "Lima"})


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (QWEN, CALL),
        (LLAMA, '{"name": "get_time", "parameters": {"zone": "Lima"}}'),
        (MISTRAL, '[TOOL_CALLS] [{"name": "get_time", "arguments": {"zone": "Lima"}}]'),
        (MISTRAL, '[TOOL_CALLS]get_time[ARGS]{"zone": "Lima"}'),
    ],
)
def test_a_call_is_read_in_the_notation_of_the_models_template(
    start: Serve, write: Callable[[str], None], template: str, text: str
) -> None:
    write(text)
    assert both_ways(start(template)) == (None, [TIME], "tool_calls")


def test_an_option_names_the_notation(start: Serve, write: Callable[[str], None]) -> None:
    write('{"name": "get_time", "parameters": {"zone": "Lima"}}')
    assert both_ways(start(QWEN, tool_call_parser="llama3")) == (None, [TIME], "tool_calls")


def test_text_and_several_calls(start: Serve, write: Callable[[str], None]) -> None:
    write(f'Let me see.\n{CALL}\n<tool_call>\n{{"name": "add", "arguments": {{"a": [1, "é🦩"]}}}}\n</tool_call>')
    content, calls, reason = both_ways(start())
    assert (content, reason) == ("Let me see.", "tool_calls")
    assert calls == [TIME, ("add", {"a": [1, "é🦩"]})]
    client = start()
    assert both_ways(client, parallel_tool_calls=False)[1] == [TIME]
    ids = [call.id for answer in (plain(client), plain(client)) for call in answer.choices[0].message.tool_calls or ()]
    assert len(set(ids)) == 4


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>\n{"name": "get_time", "arguments": {"zone": }}\n</tool_call>',
        '<tool_call>\n{"name": "launch", "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "get_time", "arguments": "Lima"}\n</tool_call>',
        "I would use <tool_call> for that.",
        "Half past nine.",
    ],
)
def test_what_is_no_call_is_content(start: Serve, write: Callable[[str], None], text: str) -> None:
    write(text)
    assert both_ways(start()) == (text, [], "stop")


def test_a_call_that_is_cut_off_is_content(start: Serve, write: Callable[[str], None]) -> None:
    write(CALL)
    content, calls, reason = both_ways(start(), max_tokens=12)
    assert (calls, reason) == ([], "length")
    assert content
    assert CALL.startswith(content)


def test_without_tools_nothing_is_looked_for(start: Serve, write: Callable[[str], None]) -> None:
    write(CALL)
    client = start()
    for fields in ({"tools": openai.omit}, {"tools": TOOLS, "tool_choice": "none"}):
        assert both_ways(client, **fields) == (CALL, [], "stop")


def test_the_model_is_told_of_the_tools(start: Serve, engine: ScriptedEngine) -> None:
    client = start()
    plain(client)
    plain(client, tool_choice="none")
    told, not_told = (engine.tokenizer.decode(call.prompt_ids) for call in engine.calls)
    assert '"description": "The time in a zone."' in told
    assert "get_time" not in not_told


def test_a_stream_opens_each_call_once_and_sends_arguments_after_it(start: Serve, write: Callable[[str], None]) -> None:
    write(f"{CALL}{CALL}")
    chunks = list(
        start().chat.completions.create(model="scripted", messages=QUESTION, tools=TOOLS, max_tokens=200, stream=True)
    )
    calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    assert [(call.index, call.function.name) for call in calls if call.function and call.function.name] == [
        (0, "get_time"),
        (1, "get_time"),
    ]
    assert len({call.id for call in calls if call.id}) == 2
    assert all(chunk.choices[0].delta.content in (None, "") for chunk in chunks)
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["tool_calls"]


def test_logprobs_of_every_token_come_with_a_streamed_call(
    start: Serve, write: Callable[[str], None], engine: ScriptedEngine
) -> None:
    write(CALL)
    fields: Any = {"model": "scripted", "messages": QUESTION, "tools": TOOLS, "logprobs": True, "max_tokens": 200}
    chunks = list(start().chat.completions.create(**fields, stream=True))
    entries = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices[0].logprobs]
    assert sum(len(entry.content or ()) for entry in entries) == len(engine.tokens)


def history(arguments: Any, **fields: Any) -> list[Json]:
    call = {"id": "c1", "type": "function", "function": {"name": "get_time", "arguments": arguments}}
    return [
        *QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [call], **fields},
        {"role": "tool", "tool_call_id": "c1", "content": "09:30"},
    ]


PLAIN = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"


@pytest.mark.parametrize("template", [QWEN, LLAMA, MISTRAL, PLAIN])
@pytest.mark.parametrize("arguments", ['{"zone": "Lima"}', {"zone": "Lima"}])
def test_a_history_holds_the_arguments_once_and_not_quoted_twice(
    start: Serve, engine: ScriptedEngine, template: str, arguments: Any
) -> None:
    answer = plain(start(template), messages=history(arguments))
    assert answer.choices[0].message.content == "Hello there, dear friend."
    prompt = engine.tokenizer.decode(engine.calls[0].prompt_ids)
    assert prompt.count("Lima") == 2  # once in the question
    assert '{"zone": "Lima"}' in prompt
    assert prompt.count("09:30") == 1


@pytest.mark.parametrize("arguments", ["", "5", "[1]", "not json", "{", '"{}"', {}, {"a": {"b": [None]}}, "[" * 5000])
@pytest.mark.parametrize("template", [QWEN, MISTRAL, PLAIN])
def test_a_history_with_strange_arguments_is_no_fault_of_the_servers(
    start: Serve, template: str, arguments: Any
) -> None:
    client = start(template)
    with contextlib.suppress(openai.BadRequestError):  # a template may refuse them
        assert plain(client, messages=history(arguments), max_tokens=1).choices
    assert plain(client).choices


def test_an_answer_with_calls_can_be_sent_back_as_it_came(start: Serve, write: Callable[[str], None]) -> None:
    write(CALL)
    for template in (QWEN, PLAIN):
        client = start(template)
        message = plain(client).choices[0].message
        assert message.tool_calls
        result: Any = {
            "role": "tool",
            "tool_call_id": message.tool_calls[0].id,
            "content": [{"type": "text", "text": "09:30"}],
        }
        for earlier in (message, message.model_dump()):
            assert plain(client, messages=[*QUESTION, earlier, result]).choices


def test_a_template_that_knows_no_tools_gets_them_in_words(
    start: Serve, engine: ScriptedEngine, write: Callable[[str], None]
) -> None:
    write(CALL)
    client = start(PLAIN)
    assert both_ways(client, messages=[{"role": "system", "content": "Be brief."}, *QUESTION])[1] == [TIME]
    prompt = engine.tokenizer.decode(engine.calls[0].prompt_ids)
    assert prompt.startswith("system: Be brief.\n\n")
    assert '{"name": "get_time", "description": "The time in a zone.", "parameters": {"type": "object"' in prompt
    assert "<tool_call>\n" in prompt
    plain(client, messages=history('{"zone": "Lima"}'))
    prompt = engine.tokenizer.decode(engine.calls[-1].prompt_ids)
    assert f"assistant: {CALL}\nuser: <tool_response>\n09:30\n</tool_response>\n" in prompt
    assert "tool:" not in prompt


@pytest.mark.parametrize(
    ("template", "fields"), [(QWEN, {"tool_call_parser": "none"}), (f"{PLAIN}{{{{ tools }}}}<function=f>", {})]
)
def test_tools_of_a_model_whose_notation_is_not_known_are_refused(start: Serve, template: str, fields: Any) -> None:
    client = start(template, **fields)
    with pytest.raises(openai.BadRequestError, match="--tool-call-parser") as error:
        plain(client)
    assert error.value.param == "tools"
    assert plain(client, tool_choice="none").choices


@pytest.mark.parametrize("template", [QWEN, LLAMA, MISTRAL])
def test_with_a_form_for_the_answer_it_is_read_as_a_call_or_as_text(
    start: Serve, write: Callable[[str], None], engine: ScriptedEngine, template: str
) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}, "strict": True}}
    call = {
        QWEN: CALL,
        LLAMA: '{"name": "get_time", "parameters": {"zone": "Lima"}}',
        MISTRAL: '[TOOL_CALLS] [{"name": "get_time", "arguments": {"zone": "Lima"}}]',
    }[template]
    client = start(template)
    for fields in ({}, {"tool_choice": "required"}):
        write(call)
        assert both_ways(client, **fields, response_format=form) == (None, [TIME], "tool_calls")
    for fields in ({}, {"tool_choice": "none"}):
        write('{"n": 5}')
        assert both_ways(client, **fields, response_format=form) == ('{"n": 5}', [], "stop")
    assert [call.params.tool_grammar is not None for call in engine.calls] == [True] * 6 + [False] * 2
    assert [call.params.response_format is not None for call in engine.calls] == [False] * 6 + [True] * 2


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": QUESTION, "tools": [{"type": "function", "function": {"name": "f"}}]}),
        ("/v1/responses", {"input": "Hi", "tools": [{"type": "function", "name": "f"}]}),
        ("/v1/messages", {"messages": QUESTION, "max_tokens": 5, "tools": [{"name": "f"}]}),
        ("/v1/messages/count_tokens", {"messages": QUESTION, "tools": [{"name": "f"}]}),
    ],
)
@pytest.mark.parametrize(
    "schema",
    [
        *({"type": "string"}, {"type": ["array", "null"]}, {"type": 5}, [], "object", {"type": "strng"}),
        {"$ref": "#/$defs/s", "$defs": {"s": {"type": "string"}}},
        *({"const": 5}, {"enum": ["a", [1]]}, {"anyOf": [{"type": "string"}, {"type": "null"}]}),
        *(
            {"oneOf": [{"type": "string"}, {"const": None}]},
            {"allOf": [{"type": "string"}]},
            {"allOf": [{"enum": [1]}]},
        ),
        {"allOf": [{"type": "object"}, {"$ref": "#/$defs/a"}], "$defs": {"a": {"anyOf": [{"type": "array"}]}}},
        *({"$ref": "#/$defs/missing"}, {"properties": {"a": {"$ref": "#/$defs/missing"}}}),
        {"type": "object", "properties": {"a": {"type": "string", "pattern": "("}}},
        {"type": "object", "properties": {"a": {"type": "integer", "minimum": 5, "maximum": 3}}},
        {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "strng"}}}},
        {"type": "object", "properties": {"c": {"$ref": "#"}}, "required": ["c"]},
    ],
)
@pytest.mark.parametrize("forced", [False, True])
def test_parameters_that_are_no_object_are_refused_by_name(
    start: Serve, path: str, body: Json, schema: Any, forced: bool
) -> None:
    name = "input_schema" if "messages" in path else "parameters"
    tool = body["tools"][0]
    with_schema = {"function": {**tool["function"], name: schema}} if "function" in tool else {name: schema}
    url = str(start().base_url).removesuffix("/v1/")
    choice: Any = {"type": "any"} if path.startswith("/v1/messages") else "required"
    fields = {"tool_choice": choice} if forced else {}
    response = httpx.post(f"{url}{path}", json={**body, **fields, "tools": [{**tool, **with_schema}]})
    assert response.status_code == 400
    assert "tools.0" in response.json()["error"]["message"]
    assert name in response.json()["error"]["message"]


def test_a_choice_without_tools_is_refused_in_the_words_of_the_client(start: Serve) -> None:
    url = str(start().base_url).removesuffix("/v1/")
    for path, choice, word in (
        ("/v1/messages", {"type": "any"}, "any"),
        ("/v1/chat/completions", "required", "required"),
        ("/v1/responses", "required", "required"),
    ):
        body = {"messages": QUESTION, "max_tokens": 5} if path != "/v1/responses" else {"input": "Hi"}
        response = httpx.post(f"{url}{path}", json={**body, "tool_choice": choice})
        assert response.status_code == 400
        assert f"tool_choice {word} needs tools" in response.json()["error"]["message"]


def test_choices_are_read_each_on_its_own(start: Serve, write: Callable[[str], None]) -> None:
    write(CALL)
    answer = plain(start(), n=3)
    assert [choice.finish_reason for choice in answer.choices] == ["tool_calls"] * 3
    assert len({choice.message.tool_calls[0].id for choice in answer.choices if choice.message.tool_calls}) == 3
