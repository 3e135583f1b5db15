"""What clients without a library of their own ask, and what the answers must be."""

from __future__ import annotations

import json
from typing import Any

GET_TIME = {
    "name": "get_time",
    "parameters": {"type": "object", "properties": {"zone": {"type": "string", "maxLength": 8}}, "required": ["zone"]},
}


def chat_bodies(question: str) -> list[dict[str, Any]]:
    """A chat, the same streamed, and a tool call."""
    chat = {"messages": [{"role": "user", "content": question}], "max_tokens": 8, "temperature": 0}
    tools = {"tools": [{"type": "function", "function": GET_TIME}], "tool_choice": "required", "max_tokens": 64}
    return [chat, {**chat, "stream": True}, {**chat, **tools}]


def check_answers(texts: list[str], answer: str) -> None:
    """Check the bodies that came back for `chat_bodies`."""
    whole, streamed, called = texts
    assert json.loads(whole)["choices"][0]["message"]["content"] == answer
    *events, done = [line[6:] for line in streamed.splitlines() if line.startswith("data: ")]
    assert done == "[DONE]"
    deltas = [json.loads(event)["choices"][0]["delta"] for event in events]
    assert "".join(delta.get("content") or "" for delta in deltas) == answer
    [call] = json.loads(called)["choices"][0]["message"]["tool_calls"]
    assert list(json.loads(call["function"]["arguments"])) == ["zone"]
