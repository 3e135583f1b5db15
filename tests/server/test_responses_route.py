"""/v1/responses, driven by OpenAI's own client: whole answers, streams, and what a server without memory refuses."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import openai
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from mini_sglang.errors import FieldError
from mini_sglang.server.responses.bodies import ResponsesBody
from tests.server.conftest import ScriptedEngine

ROUTE = "/v1/responses"
TEXT = "Hello there, dear friend."

Json = dict[str, Any]


@pytest.fixture
def openai_client(serve: Callable[..., str]) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{serve()}/v1", api_key="none", max_retries=0)


def create(client: TestClient, **fields: Any) -> Any:
    return client.post(ROUTE, json={"input": "Hi", **fields})


def test_the_client_reads_an_answer(openai_client: openai.OpenAI, engine: ScriptedEngine) -> None:
    response = openai_client.responses.create(model="scripted", input="Hi", instructions="Be kind.")
    assert response.output_text == TEXT
    assert response.status == "completed"
    assert response.usage is not None
    assert response.usage.input_tokens == len(engine.calls[0].prompt_ids)
    assert response.usage.output_tokens == len(engine.tokens)
    chat = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
    assert engine.calls[0].prompt_ids == engine.tokenizer.apply_chat_template(chat)


def test_the_clients_stream_helper_builds_the_same_answer(openai_client: openai.OpenAI) -> None:
    whole = openai_client.responses.create(model="scripted", input="Hi", top_logprobs=2)
    kinds, text = [], ""
    with openai_client.responses.stream(model="scripted", input="Hi", top_logprobs=2) as stream:
        for event in stream:
            kinds.append(event.type)
            assert event.sequence_number == len(kinds) - 1
            if event.type == "response.output_text.delta":
                text += event.delta
        final = stream.get_final_response()
    assert text == final.output_text == whole.output_text
    assert final.usage == whole.usage
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    content = whole.output[0].content[0]  # type: ignore[union-attr, index]
    assert [len(entry.top_logprobs) for entry in content.logprobs] == [2] * len(content.logprobs)  # type: ignore[union-attr, arg-type]


def test_the_asynchronous_client_streams_too(serve: Callable[..., str]) -> None:
    async def run() -> str:
        async with openai.AsyncOpenAI(base_url=f"{serve()}/v1", api_key="none") as client:
            stream = await client.responses.create(model="scripted", input="Hi", stream=True)
            return "".join([event.delta async for event in stream if event.type == "response.output_text.delta"])

    assert asyncio.run(run()) == TEXT


def test_a_text_format_is_a_chats_response_format(client: TestClient, engine: ScriptedEngine) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    text = {"format": {"type": "json_schema", "name": "x", "schema": schema, "strict": True}}
    assert create(client, text=text).json()["text"]["format"]["schema"] == schema
    named = {"name": "x", "schema": schema, "strict": True}
    assert engine.calls[0].params.response_format == {"type": "json_schema", "json_schema": named}


def test_an_answer_can_be_sent_back_as_it_came(openai_client: openai.OpenAI, engine: ScriptedEngine) -> None:
    first = openai_client.responses.create(model="scripted", input="Hi")
    user = {"role": "user", "content": [{"type": "input_text", "text": "And now?"}]}
    history: Any = [{"role": "user", "content": "Hi"}, *[item.model_dump() for item in first.output], user]
    openai_client.responses.create(model="scripted", input=history, store=False)
    roles = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": TEXT}]
    expected = engine.tokenizer.apply_chat_template([*roles, {"role": "user", "content": "And now?"}])
    assert engine.calls[1].prompt_ids == expected


def test_a_cut_off_answer_is_incomplete(openai_client: openai.OpenAI) -> None:
    whole = openai_client.responses.create(model="scripted", input="Hi", max_output_tokens=2)
    assert whole.status == "incomplete"
    assert whole.incomplete_details is not None
    assert whole.incomplete_details.reason == "max_output_tokens"
    *_, last = openai_client.responses.create(model="scripted", input="Hi", max_output_tokens=2, stream=True)
    assert last.type == "response.incomplete"
    assert last.response.output_text == whole.output_text


TOOLS: list[Any] = [{"type": "function", "name": "get_time", "parameters": {"type": "object"}, "strict": False}]
CALL = '<think>Hm.</think>Let me see.<tool_call>{"name": "get_time", "arguments": {"zone": "Lima"}}</tool_call>'


def test_reasoning_and_calls_are_items_of_their_own(serve: Callable[..., str], engine: ScriptedEngine) -> None:
    engine.tokens = [*engine.tokenizer.encode(CALL), engine.eos]
    url = serve(tool_call_parser="hermes", reasoning_parser="think")
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    whole = client.responses.create(model="scripted", input="Hi", tools=TOOLS)
    assert [item.type for item in whole.output] == ["reasoning", "message", "function_call"]
    assert whole.output_text == "Let me see."
    call = whole.output[2]
    assert call.type == "function_call"
    assert (call.name, json.loads(call.arguments)) == ("get_time", {"zone": "Lima"})
    assert whole.usage is not None
    assert whole.usage.output_tokens_details.reasoning_tokens > 0
    with client.responses.stream(model="scripted", input="Hi", tools=TOOLS) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.function_call_arguments.delta")
        final = stream.get_final_response()
    assert json.loads(text) == {"zone": "Lima"}
    assert [item.type for item in final.output] == [item.type for item in whole.output]
    assert final.output_text == whole.output_text
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "09:30"}
    history: Any = [{"role": "user", "content": "Hi"}, *[item.model_dump() for item in whole.output], output]
    assert client.responses.create(model="scripted", input=history, tools=TOOLS).status == "completed"


def test_a_failure_in_a_stream_is_told(openai_client: openai.OpenAI, engine: ScriptedEngine) -> None:
    engine.fail_after = 2
    *_, error, last = openai_client.responses.create(model="scripted", input="Hi", stream=True)
    assert error.type == "error"
    assert last.type == "response.failed"
    assert last.response.error is not None


@pytest.mark.parametrize(
    "fields",
    [
        {"store": True},
        {"previous_response_id": "resp_1"},
        {"conversation": "c"},
        {"background": True},
        {"prompt": {"id": "p"}},
        {"truncation": "auto"},
        {"max_tokens": 3},
        {"max_output_tokens": 0},
        {"include": ["file_search_call.everything"]},
        {"input": []},
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        {"input": [{"type": "item_reference", "id": "x"}]},
        {"temperature": 1000},
    ],
)
def test_what_is_not_supported_is_refused_by_name(client: TestClient, fields: Json) -> None:
    response = create(client, **fields)
    assert response.status_code == 400
    [name] = fields
    assert response.json()["error"]["param"] == name
    assert name in response.json()["error"]["message"]


def test_a_name_that_no_tool_can_have_is_found_among_the_tools(client: TestClient) -> None:
    error = create(client, tools=[*TOOLS, {"type": "function", "name": "a b"}]).json()["error"]
    assert error["param"] == "tools"
    assert error["message"].startswith("tools.1.name: ")


SCHEMA_FORMAT = {"type": "json_schema", "name": "x", "schema": {"type": "object"}}


@pytest.mark.parametrize("fields", [{"regex": "a"}, {"choice": ["a"]}])
def test_what_the_engine_calls_otherwise_is_named_as_the_client_does(
    make_app: Callable[..., FastAPI], fields: Json
) -> None:
    client = TestClient(make_app(tool_call_parser="hermes"))
    error = create(client, text={"format": SCHEMA_FORMAT}, **fields).json()["error"]
    assert error["param"] == "text.format"
    assert error["message"].startswith("text.format cannot be combined with")


def test_a_conversation_that_is_too_long_is_the_clients_input(client: TestClient) -> None:
    for length, problem in ((500, "input has "), (100_000, "input has at least ")):
        error = create(client, input="1 " * length).json()["error"]
        assert error["param"] == "input"
        assert error["message"].startswith(problem)


def test_a_refusal_while_it_runs_names_the_clients_field_too(client: TestClient, engine: ScriptedEngine) -> None:
    engine.error = FieldError("response_format", "cannot be followed: too deep")
    for stream in (False, True):
        error = create(client, text={"format": SCHEMA_FORMAT}, stream=stream).json()["error"]
        assert error["param"] == "text.format"
        assert error["message"] == "text.format cannot be followed: too deep"


def test_items_of_one_answer_lose_no_reasoning() -> None:
    items: list[Json] = [{"type": "reasoning", "summary": [], "content": text} for text in ("First.", "Then.")]
    message = {"role": "assistant", "content": "Yes."}
    body = ResponsesBody.model_validate({"input": [{"role": "user", "content": "Hi"}, *items, message]})
    [_, answer] = body.chat_messages()
    assert (answer.reasoning_content, answer.content) == ("First.\nThen.", "Yes.")


def test_fields_that_ask_for_nothing_pass(client: TestClient) -> None:
    fields = {"store": False, "tools": [], "tool_choice": "auto", "text": {"format": {"type": "text"}}, "metadata": {}}
    assert create(client, **fields, include=["reasoning.encrypted_content"]).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_parameters_that_no_answer_could_repeat_are_refused(client: TestClient, stream: bool) -> None:
    deep = json.loads('{"a":' * 300 + "1" + "}" * 300)
    tool = {"type": "function", "name": "f", "parameters": deep}
    response = client.post("/v1/responses", json={"input": "Hi", "stream": stream, "tools": [tool]})
    assert response.status_code == 400
    assert response.json()["error"]["message"] == "tools.0.parameters must be nested at most 100 deep"
