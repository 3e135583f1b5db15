"""What takes long with a large request, or a large answer, is done in a thread: the streams of all others go on."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from typing import Any

import pytest
from fastapi.testclient import TestClient

from mini_sglang.server.answers.model_format import ModelFormat
from mini_sglang.server.anthropic.bodies import MessagesBody, PromptBody
from mini_sglang.server.anthropic.history import TextBlock, Turn
from mini_sglang.server.chat import Message
from mini_sglang.server.native.format import GenerateFormat
from mini_sglang.server.openai.format import ChatFormat, CompletionFormat
from mini_sglang.server.responses.bodies import ResponsesBody
from mini_sglang.server.responses.format import ResponseFormat
from mini_sglang.server.responses.items import InputMessage
from mini_sglang.server.sglang.format import SglangFormat

Json = dict[str, Any]
Halts = Callable[..., list[bool]]


@pytest.fixture
def halts(monkeypatch: pytest.MonkeyPatch) -> Halts:
    """`halts(owner, name)` → for each call of that function from now on, whether the event loop waits for it."""

    def watch(owner: object, name: str) -> list[bool]:
        calls: list[bool] = []
        function = getattr(owner, name)

        @functools.wraps(function)
        def watched(*args: Any, **kwargs: Any) -> Any:
            try:
                calls.append(bool(asyncio.get_running_loop()))
            except RuntimeError:
                calls.append(False)
            return function(*args, **kwargs)

        monkeypatch.setattr(owner, name, watched)
        return calls

    return watch


@pytest.mark.parametrize(
    ("route", "body", "read_by"),
    [
        ("/v1/messages", {"max_tokens": 1, "messages": [{"role": "user", "content": "Hi"}] * 1000}, PromptBody),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "Hi"}] * 1000}, PromptBody),
        ("/v1/responses", {"input": [{"role": "user", "content": "Hi"}] * 1000}, ResponsesBody),
    ],
)
def test_a_long_conversation_is_read(client: TestClient, halts: Halts, route: str, body: Json, read_by: type) -> None:
    calls = halts(read_by, "chat_messages")
    client.post(route, json=body)
    assert calls == [False]


@pytest.mark.parametrize("field", ["content", "name", "reasoning_content", "reasoning", "tool_call_id"])
def test_a_long_message_becomes_tokens(client: TestClient, halts: Halts, field: str) -> None:
    calls = halts(ModelFormat, "render")
    message = {"role": "assistant", "content": "Hello", field: "word " * 1000}
    client.post("/tokenize", json={"messages": [message]})
    assert calls == [False]


@pytest.mark.parametrize("field", ["name", "arguments", "id"])
def test_a_long_call_becomes_tokens(client: TestClient, halts: Halts, field: str) -> None:
    calls = halts(ModelFormat, "render")
    call: Json = {"id": "c", "function": {"name": "f", "arguments": "{}"}}
    part = call if field == "id" else call["function"]
    part[field] = "word " * 1000
    client.post("/tokenize", json={"messages": [{"role": "assistant", "tool_calls": [call]}]})
    assert calls == [False]


@pytest.mark.parametrize(
    ("body", "role"),
    [
        (
            MessagesBody(max_tokens=1, messages=[Turn(role="user", content=[TextBlock(type="text", text="Hi")])] * 100),
            "user",
        ),
        (ResponsesBody(input=[InputMessage(role="assistant", content="Hi")] * 100), "assistant"),
    ],
)
def test_turns_of_one_role_are_copied_once(
    body: MessagesBody | ResponsesBody, role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    make = Message.__init__

    def watched(message: Message, **fields: Any) -> None:
        made.append(fields["content"])
        make(message, **fields)

    monkeypatch.setattr(Message, "__init__", watched)
    [message] = body.chat_messages()
    assert (message.role, message.content) == (role, "\n".join(["Hi"] * 100))
    assert made == [*["Hi"] * 100, message.content]


LONG = {"max_tokens": 300, "ignore_eos": True}
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "logprobs": True, "top_logprobs": 20, **LONG}
PROMPT = {"prompt": "Hi", "logprobs": 20, **LONG}
INPUT = {"input": "Hi", "top_logprobs": 20, "max_output_tokens": 300, "ignore_eos": True}
TEXT = {
    "text": "Hi",
    "return_logprob": True,
    "top_logprobs_num": 20,
    "sampling_params": {"max_new_tokens": 300, "ignore_eos": True},
}


@pytest.mark.parametrize(
    ("route", "body", "owner", "name"),
    [
        ("/v1/chat/completions", CHAT, ChatFormat, "whole"),
        ("/v1/completions", PROMPT, CompletionFormat, "whole"),
        ("/v1/responses", INPUT, ResponseFormat, "whole"),
        ("/generate", PROMPT, GenerateFormat, "whole"),
        ("/generate", TEXT, SglangFormat, "whole"),
    ],
)
def test_an_answer_with_many_log_probabilities_is_written(
    client: TestClient, halts: Halts, route: str, body: Json, owner: object, name: str
) -> None:
    calls = halts(owner, name)
    assert client.post(route, json=body).status_code == 200
    assert calls == [False]


@pytest.mark.parametrize(
    ("route", "body", "owner"),
    [
        ("/v1/completions", {"prompt": [5] * 300, "echo": True, "logprobs": 20, "max_tokens": 3}, CompletionFormat),
        (
            "/generate",
            {"input_ids": [5] * 300, "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 20},
            SglangFormat,
        ),
    ],
)
def test_an_event_with_many_log_probabilities_is_written(
    client: TestClient, halts: Halts, route: str, body: Json, owner: object
) -> None:
    calls = halts(owner, "_choice")
    assert client.post(route, json={**body, "stream": True}).status_code == 200
    first, *others = calls  # the first has those of the prompt
    assert not first
    assert others
    assert all(others)
