"""Anthropic's routes, driven by Anthropic's own client where it is installed and by their documented events else."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from tests.server.conftest import ScriptedEngine

MESSAGES = "/v1/messages"
TEXT = "Hello there, dear friend."
HI = [{"role": "user", "content": "Hi"}]
TOOLS = [{"name": "get_time", "description": "Time", "input_schema": {"type": "object", "properties": {}}}]

Json = dict[str, Any]


def send(client: TestClient, **fields: Any) -> Any:
    return client.post(MESSAGES, json={"model": "scripted", "max_tokens": 64, "messages": HI, **fields})


def events(response: Any) -> list[Json]:
    """The events of a stream; each is sent under the name that is its type."""
    assert response.status_code == 200, response.text
    blocks = response.text.split("\n\n")
    assert blocks.pop() == ""
    items = []
    for block in blocks:
        name, data = block.split("\n")
        item = json.loads(data.removeprefix("data: "))
        assert name == f"event: {item['type']}"
        items.append(item)
    return items


def test_a_message_has_the_documented_shape(client: TestClient, engine: ScriptedEngine) -> None:
    answer = send(client).json()
    assert answer["type"] == "message"
    assert answer["role"] == "assistant"
    assert answer["id"].startswith("msg_")
    assert answer["content"] == [{"type": "text", "text": TEXT}]
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("end_turn", None)
    assert answer["usage"]["input_tokens"] == len(engine.calls[0].prompt_ids)
    assert answer["usage"]["output_tokens"] == len(engine.tokens)


def test_a_stream_is_the_documented_sequence_of_events(client: TestClient) -> None:
    items = events(send(client, stream=True))
    kinds = [item["type"] for item in items]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert items[0]["message"]["content"] == []
    assert items[0]["message"]["stop_reason"] is None
    assert "".join(item["delta"]["text"] for item in items[2:-3]) == TEXT
    assert items[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert items[-2]["usage"]["output_tokens"] == send(client).json()["usage"]["output_tokens"]


@pytest.mark.parametrize(
    ("fields", "reason", "sequence"),
    [
        ({"max_tokens": 2}, "max_tokens", None),
        ({"stop_sequences": [", dear"]}, "stop_sequence", ", dear"),
        ({"max_tokens": 4096, "ignore_eos": True}, "model_context_window_exceeded", None),
    ],
)
def test_the_end_is_told_in_anthropics_words(
    client: TestClient, fields: Json, reason: str, sequence: str | None
) -> None:
    answer = send(client, **fields).json()
    assert (answer["stop_reason"], answer["stop_sequence"]) == (reason, sequence)
    assert events(send(client, **fields, stream=True))[-2]["delta"]["stop_reason"] == reason


def test_the_prompt_is_that_of_the_same_chat(client: TestClient, engine: ScriptedEngine) -> None:
    blocks = [{"type": "text", "text": "Be", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": " kind"}]
    turns = [{"role": "user", "content": "a"}, {"role": "user", "content": blocks}]
    send(client, system=blocks, messages=turns)
    chat = [{"role": "system", "content": "Be kind"}, {"role": "user", "content": "a\nBe kind"}]
    assert engine.calls[-1].prompt_ids == engine.tokenizer.apply_chat_template(chat)
    prefill = [*HI, {"role": "assistant", "content": "Well,"}]
    send(client, messages=prefill)
    expected = engine.tokenizer.apply_chat_template(prefill, continue_final_message=True)
    assert engine.calls[-1].prompt_ids == expected
    counted = client.post(f"{MESSAGES}/count_tokens", json={"model": "scripted", "messages": prefill})
    assert counted.json() == {"input_tokens": len(expected)}


@pytest.mark.parametrize(
    ("fields", "status", "kind", "named"),
    [
        ({"max_tokens": None}, 400, "invalid_request_error", "max_tokens"),
        ({"max_tokens": 0}, 400, "invalid_request_error", "max_tokens"),
        ({"stop": ["x"]}, 400, "invalid_request_error", "stop"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, 400, "invalid_request_error", "thinking"),
        ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, 400, "invalid_request_error", "tools"),
        ({"tools": [*TOOLS, {"name": "a b", "input_schema": {}}]}, 400, "invalid_request_error", "tools.1.name"),
        ({"tool_choice": {"type": "any"}}, 400, "invalid_request_error", "tool_choice"),
        ({"container": "c"}, 400, "invalid_request_error", "container"),
        ({"messages": []}, 400, "invalid_request_error", "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, 400, "invalid_request_error", "messages"),
        ({"model": "other"}, 404, "not_found_error", "model"),
    ],
)
def test_errors_have_anthropics_shape_and_name_the_field(
    client: TestClient, fields: Json, status: int, kind: str, named: str
) -> None:
    response = send(client, **fields)
    assert response.status_code == status
    assert response.json()["type"] == "error"
    assert response.json()["error"]["type"] == kind
    assert named in response.json()["error"]["message"]


CALL = '<think>Hm.</think>Let me see.<tool_call>{"name": "get_time", "arguments": {"zone": "Lima"}}</tool_call>'


def tool_client(make_app: Callable[..., FastAPI], engine: ScriptedEngine) -> TestClient:
    engine.tokens = [*engine.tokenizer.encode(CALL), engine.eos]
    return TestClient(make_app(tool_call_parser="hermes", reasoning_parser="think"))


def test_reasoning_and_calls_are_blocks_of_their_own(make_app: Callable[..., FastAPI], engine: ScriptedEngine) -> None:
    client = tool_client(make_app, engine)
    answer = send(client, tools=TOOLS).json()
    thinking, text, call = answer["content"]
    assert thinking == {"type": "thinking", "thinking": "Hm.", "signature": ""}
    assert text == {"type": "text", "text": "Let me see."}
    assert call == {"type": "tool_use", "id": call["id"], "name": "get_time", "input": {"zone": "Lima"}}
    assert answer["stop_reason"] == "tool_use"
    items = events(send(client, tools=TOOLS, stream=True))
    starts = [item for item in items if item["type"] == "content_block_start"]
    assert [(item["index"], item["content_block"]["type"]) for item in starts] == [
        (0, "thinking"),
        (1, "text"),
        (2, "tool_use"),
    ]
    parts = [item["delta"]["partial_json"] for item in items if item.get("delta", {}).get("type") == "input_json_delta"]
    assert json.loads("".join(parts)) == {"zone": "Lima"}
    assert items[-2]["delta"]["stop_reason"] == "tool_use"


def test_calls_and_their_results_come_back_as_a_chat_has_them(
    make_app: Callable[..., FastAPI], engine: ScriptedEngine
) -> None:
    client = tool_client(make_app, engine)
    answer = send(client, tools=TOOLS).json()
    call_id = answer["content"][2]["id"]
    result = {"type": "tool_result", "tool_use_id": call_id, "content": [{"type": "text", "text": "09:30"}]}
    history = [*HI, {"role": "assistant", "content": answer["content"]}]
    response = send(client, tools=TOOLS, messages=[*history, {"role": "user", "content": [result]}])
    assert response.status_code == 200, response.text
    chat = [
        *HI,
        {"role": "assistant", "content": "Let me see.", "reasoning_content": "Hm.", "tool_calls": [
            {"id": call_id, "type": "function", "function": {"name": "get_time", "arguments": {"zone": "Lima"}}}
        ]},
        {"role": "tool", "tool_call_id": call_id, "content": "09:30"},
    ]  # fmt: skip
    tools = [{"type": "function", "function": {
        "name": "get_time", "description": "Time", "parameters": {"type": "object", "properties": {}},
    }}]  # fmt: skip
    client.post("/v1/chat/completions", json={"messages": chat, "tools": tools})
    assert engine.calls[-1].prompt_ids == engine.calls[-2].prompt_ids


def test_a_result_that_is_an_error_says_so(make_app: Callable[..., FastAPI], engine: ScriptedEngine) -> None:
    client = tool_client(make_app, engine)
    for fields, text in (
        ({"is_error": True}, "Error: no such zone"),
        ({"is_error": False}, "no such zone"),
        ({}, "no such zone"),
    ):
        result = {"type": "tool_result", "tool_use_id": "c1", "content": "no such zone", **fields}
        send(client, messages=[*HI, {"role": "user", "content": [result]}])
        chat = [*HI, {"role": "tool", "tool_call_id": "c1", "content": text}]
        client.post("/v1/chat/completions", json={"messages": chat})
        assert engine.calls[-1].prompt_ids == engine.calls[-2].prompt_ids


def test_what_the_engine_calls_otherwise_is_named_as_the_client_does(client: TestClient) -> None:
    schema = {"format": {"type": "json_schema", "schema": {"type": "object"}}}
    assert "output_config.format cannot" in send(client, output_config=schema, regex="a").json()["error"]["message"]
    assert "stop_sequences must hold" in send(client, stop_sequences=[""]).json()["error"]["message"]


def test_an_output_format_is_a_chats_response_format(client: TestClient, engine: ScriptedEngine) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    assert send(client, output_config={"format": {"type": "json_schema", "schema": schema}}).status_code == 200
    assert engine.calls[0].params.response_format == {"type": "json_schema", "json_schema": {"schema": schema}}


def test_fields_that_ask_for_nothing_pass(client: TestClient) -> None:
    fields = {"thinking": {"type": "disabled"}, "tools": [], "metadata": {"user_id": "x"}, "service_tier": "auto"}
    assert send(client, **fields, cache_control={"type": "ephemeral"}).status_code == 200


def test_a_failure_in_a_stream_is_an_error_event(client: TestClient, engine: ScriptedEngine) -> None:
    engine.fail_after = 2
    last = events(send(client, stream=True))[-1]
    assert last["type"] == "error"
    assert last["error"]["type"] == "api_error"


def test_a_missing_key_is_told_in_the_same_shape(make_app: Callable[..., FastAPI]) -> None:
    client = TestClient(make_app(api_key=("secret",)))
    assert send(client).json()["error"]["type"] == "authentication_error"
    headers = {"x-api-key": "secret"}
    body = {"model": "scripted", "max_tokens": 4, "messages": HI}
    assert client.post(MESSAGES, json=body, headers=headers).status_code == 200


def test_anthropics_client_understands_everything(serve: Callable[..., str]) -> None:
    anthropic = pytest.importorskip("anthropic")
    client = anthropic.Anthropic(base_url=serve(api_key=("secret",)), api_key="secret", max_retries=0)
    body: Json = {"model": "scripted", "max_tokens": 64, "messages": HI, "system": "Be kind."}
    message = client.messages.create(**body)
    assert message.content[0].text == TEXT
    with client.messages.stream(**body) as stream:
        assert "".join(stream.text_stream) == TEXT
        assert stream.get_final_message().usage.output_tokens == message.usage.output_tokens
    counted = client.messages.count_tokens(model="scripted", messages=HI, system="Be kind.")
    assert counted.input_tokens == message.usage.input_tokens
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(**{**body, "model": "other"})


def test_anthropics_asynchronous_client_streams_too(serve: Callable[..., str]) -> None:
    anthropic = pytest.importorskip("anthropic")

    async def run() -> tuple[str, str]:
        async with anthropic.AsyncAnthropic(base_url=serve(), api_key="none", max_retries=0) as client:
            asked: Json = {"model": "scripted", "max_tokens": 64, "messages": HI}
            whole = await client.messages.create(**asked)
            async with client.messages.stream(**asked) as stream:
                return whole.content[0].text, "".join([text async for text in stream.text_stream])

    assert asyncio.run(run()) == (TEXT, TEXT)


def test_thinking_can_be_left_out_of_an_answer(make_app: Callable[..., FastAPI], engine: ScriptedEngine) -> None:
    client = tool_client(make_app, engine)
    thinking = {"type": "adaptive", "display": "omitted"}
    shown, hidden = (send(client, thinking={**thinking, "display": d}).json() for d in ("summarized", "omitted"))
    assert hidden["content"] == [{**shown["content"][0], "thinking": ""}, *shown["content"][1:]]
    items = events(send(client, thinking=thinking, stream=True))
    blocks = [item["content_block"]["type"] for item in items if item["type"] == "content_block_start"]
    deltas = [item["delta"]["type"] for item in items if item["type"] == "content_block_delta"]
    assert blocks == ["thinking", "text"]
    assert set(deltas) == {"text_delta"}


@pytest.mark.parametrize("budget", [64, 1024])
def test_a_thinking_budget_is_less_than_all_tokens(client: TestClient, budget: int) -> None:
    response = send(client, thinking={"type": "enabled", "budget_tokens": budget})
    assert response.status_code == 400
    assert "thinking.budget_tokens must be less than max_tokens" in response.json()["error"]["message"]
    assert send(client, thinking={"type": "enabled", "budget_tokens": budget}, max_tokens=2048).status_code == 200


def test_a_systems_message_can_be_for_one_turn(client: TestClient, engine: ScriptedEngine) -> None:
    hint = {"role": "system", "content": "Be short.", "clear_at": "next_user_message"}
    send(client, messages=[*HI, hint])
    chat = [*HI, {"role": "system", "content": "Be short."}]
    assert engine.calls[-1].prompt_ids == engine.tokenizer.apply_chat_template(chat)
    answer = {"role": "assistant", "content": "Hello"}
    send(client, messages=[*HI, hint, answer, *HI])
    assert engine.calls[-1].prompt_ids == engine.tokenizer.apply_chat_template([*HI, answer, *HI])


def test_a_result_may_be_text_in_other_forms(client: TestClient, engine: ScriptedEngine) -> None:
    content = [
        {"type": "tool_reference", "tool_name": "get_time"},
        {"type": "document", "title": " a.txt", "source": {"type": "text", "media_type": "text/plain", "data": "A"}},
        {"type": "search_result", "title": " t", "source": "s", "content": [{"type": "text", "text": "c"}]},
    ]
    result = {"type": "tool_result", "tool_use_id": "c1", "content": content}
    assert send(client, messages=[*HI, {"role": "user", "content": [result]}]).status_code == 200
    chat = [*HI, {"role": "tool", "tool_call_id": "c1", "content": "get_time a.txt\nA t\ns\nc"}]
    client.post("/v1/chat/completions", json={"messages": chat})
    assert engine.calls[-1].prompt_ids == engine.calls[-2].prompt_ids


def test_anthropics_own_tools_cannot_be_asked_for(client: TestClient) -> None:
    tools = [*TOOLS, {"type": "web_search_20250305", "name": "web_search"}]
    error = send(client, tools=tools, tool_choice={"type": "tool", "name": "web_search"}).json()["error"]
    assert error["message"] == "tool_choice names 'web_search', which is not among the tools"
    alone = send(client, tools=tools[1:]).json()["error"]
    assert alone["message"].startswith("tools must hold a function: this server runs no tool of type 'web_search_")
    only_code = send(client, tools=[{**TOOLS[0], "allowed_callers": ["code_execution_20260120"]}]).json()["error"]
    assert only_code["message"].startswith('tools.0.allowed_callers must hold "direct"')
