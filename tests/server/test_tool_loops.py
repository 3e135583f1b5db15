"""Loops with tools through the built-in model with the stock clients: a call that must be made, its result, an answer.

Each API whole and streamed, with any of the functions and with the one that is named.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from tests.server.conftest import StartServer
from tests.tiny import RunningServer

ZONE = {
    "type": "object",
    "properties": {"zone": {"type": "string", "maxLength": 8}, "exact": {"type": "boolean"}},
    "required": ["zone", "exact"],
    "additionalProperties": False,
}
GET_TIME: Any = {"name": "get_time", "description": "The local time in a time zone.", "parameters": ZONE}
STOP: Any = {"name": "stop", "description": "Stop the clock.", "parameters": {"type": "object", "properties": {}}}
QUESTION: Any = {"role": "user", "content": "What time is it in Lima?"}

Calls = list[tuple[str, dict[str, Any]]]


@pytest.fixture(scope="module")
def server(start_server: StartServer) -> RunningServer:
    return start_server("--model", "smollm2-135m", "--dtype", "float32")


@pytest.fixture(scope="module")
def openai_client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def anthropic_client(server: RunningServer) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


def check_call(calls: Calls, *, named: bool) -> None:
    """The one call fits the schema of its function, and is of the one that was named."""
    [(name, arguments)] = calls
    if name == "get_time":
        assert arguments.keys() == {"zone", "exact"}
        assert len(arguments["zone"]) <= 8
        assert isinstance(arguments["exact"], bool)
    else:
        assert (name, arguments, named) == ("stop", {}, False)


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("streams", [False, True])
def test_chat_completions(openai_client: openai.OpenAI, streams: bool, named: bool) -> None:
    chat: Any = {
        **{"model": "smollm2-135m", "temperature": 0, "max_tokens": 48, "parallel_tool_calls": False},
        "tools": [{"type": "function", "function": function} for function in (GET_TIME, STOP)],
    }

    def ask(**fields: Any) -> Any:
        if not streams:
            return openai_client.chat.completions.create(**chat, **fields).choices[0]
        with openai_client.chat.completions.stream(**chat, **fields) as stream:
            return stream.get_final_completion().choices[0]

    choice = ask(
        messages=[QUESTION],
        tool_choice={"type": "function", "function": {"name": "get_time"}} if named else "required",
    )
    assert choice.finish_reason in ("tool_calls", "stop" if named else "tool_calls")
    calls = choice.message.tool_calls
    check_call([(call.function.name, json.loads(call.function.arguments)) for call in calls], named=named)
    results = [{"role": "tool", "tool_call_id": call.id, "content": "09:30"} for call in calls]
    sent_back = choice.message.model_dump(exclude_none=True)
    ended = ask(messages=[QUESTION, sent_back, *results], tool_choice="none")
    assert ended.message.content
    assert not ended.message.tool_calls


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("streams", [False, True])
def test_responses(openai_client: openai.OpenAI, streams: bool, named: bool) -> None:
    body: Any = {
        **{"model": "smollm2-135m", "temperature": 0, "max_output_tokens": 48, "parallel_tool_calls": False},
        "tools": [{"type": "function", "strict": False, **function} for function in (GET_TIME, STOP)],
    }

    def ask(**fields: Any) -> Any:
        if not streams:
            return openai_client.responses.create(**body, **fields)
        *_, last = openai_client.responses.create(**body, **fields, stream=True)
        return last.response

    response = ask(input=[QUESTION], tool_choice={"type": "function", "name": "get_time"} if named else "required")
    assert {item.type for item in response.output} == {"function_call"}
    check_call([(item.name, json.loads(item.arguments)) for item in response.output], named=named)
    results = [{"type": "function_call_output", "call_id": item.call_id, "output": "09:30"} for item in response.output]
    sent_back = [item.model_dump() for item in response.output]
    ended = ask(input=[QUESTION, *sent_back, *results], tool_choice="none")
    assert {item.type for item in ended.output} == {"message"}
    assert ended.output_text


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("streams", [False, True])
def test_messages(anthropic_client: anthropic.Anthropic, streams: bool, named: bool) -> None:
    tools = [
        {"name": each["name"], "description": each["description"], "input_schema": each["parameters"]}
        for each in (GET_TIME, STOP)
    ]
    body: Any = {"model": "smollm2-135m", "extra_body": {"temperature": 0}, "max_tokens": 48, "tools": tools}

    def ask(**fields: Any) -> Any:
        if not streams:
            return anthropic_client.messages.create(**body, **fields)
        with anthropic_client.messages.stream(**body, **fields) as stream:
            return stream.get_final_message()

    choice = {"type": "tool", "name": "get_time"} if named else {"type": "any"}
    message = ask(messages=[QUESTION], tool_choice={**choice, "disable_parallel_tool_use": True})
    assert message.stop_reason == "tool_use"
    check_call([(block.name, block.input) for block in message.content], named=named)
    results = [{"type": "tool_result", "tool_use_id": block.id, "content": "09:30"} for block in message.content]
    sent_back = {"role": "assistant", "content": [block.model_dump() for block in message.content]}
    history = [QUESTION, sent_back, {"role": "user", "content": results}]
    ended = ask(messages=history, tool_choice={"type": "none"})
    assert [block.type for block in ended.content] == ["text"]
