"""Anthropic's library for Python: message, stream and tool call."""

from __future__ import annotations

from typing import Any

import pytest

from tests.clients.asks import GET_TIME
from tests.tiny import RunningServer

anthropic = pytest.importorskip("anthropic")


def test_message_stream_and_tool_call(server: RunningServer, question: str, answer: str) -> None:
    client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    messages = [{"role": "user", "content": question}]
    asked: dict[str, Any] = {"model": "smollm2-135m", "messages": messages, "extra_body": {"temperature": 0}}
    assert client.messages.create(**asked, max_tokens=8).content[0].text == answer
    with client.messages.stream(**asked, max_tokens=8) as stream:
        assert "".join(stream.text_stream) == answer
    tool = {"name": GET_TIME["name"], "input_schema": GET_TIME["parameters"]}
    called = client.messages.create(**asked, max_tokens=64, tools=[tool], tool_choice={"type": "any"})
    [block] = [block for block in called.content if block.type == "tool_use"]
    assert list(block.input) == ["zone"]
