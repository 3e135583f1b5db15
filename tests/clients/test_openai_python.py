"""OpenAI's library for Python: chat, stream and tool call."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.clients.asks import GET_TIME
from tests.tiny import RunningServer

openai = pytest.importorskip("openai")


def test_chat_stream_and_tool_call(server: RunningServer, question: str, answer: str) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    messages = [{"role": "user", "content": question}]
    chat: dict[str, Any] = {"model": client.models.list().data[0].id, "messages": messages, "temperature": 0}
    assert client.chat.completions.create(**chat, max_tokens=8).choices[0].message.content == answer
    stream = client.chat.completions.create(**chat, max_tokens=8, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == answer
    tools = [{"type": "function", "function": GET_TIME}]
    called = client.chat.completions.create(**chat, max_tokens=64, tools=tools, tool_choice="required")
    assert list(json.loads(called.choices[0].message.tool_calls[0].function.arguments)) == ["zone"]
