"""The forms of messages that a chat takes, and what a template is given for each."""

from __future__ import annotations

from typing import Any

import pytest

from mini_sglang.errors import FieldError
from mini_sglang.server.chat import Message
from mini_sglang.text.conversation import template_messages, template_tools

CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "cache_control": {"type": "ephemeral"}}]

FORMS: list[dict[str, Any]] = [
    {"role": "user", "content": "Hi"},
    {"role": "user", "content": ""},
    {"role": "user", "content": []},
    {"role": "user", "content": PARTS},
    {"role": "user", "content": "Hi", "name": "Ann"},
    {"role": "system", "content": "Be brief."},
    {"role": "developer", "content": "Be brief."},
    {"role": "tool", "content": "3", "tool_call_id": "call_1"},
    {"role": "tool", "content": PARTS, "tool_call_id": "call_1", "name": "add"},
    {"role": "assistant"},
    {"role": "assistant", "content": None},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "assistant", "tool_calls": [CALL, {**CALL, "id": None}]},
    {"role": "assistant", "content": "Well.", "tool_calls": [CALL]},
    {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"a": [1]}}}]},
    {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "f"}}]},
    {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": ""}}]},
    {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": "{not"}}]},
    {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": "[1]"}}]},
    {"role": "assistant", "content": "Hi", "tool_calls": []},
    {"role": "assistant", "content": "Hi", "tool_calls": None, "name": None, "refusal": None, "audio": None},
    {"role": "assistant", "content": "Hi", "reasoning_content": "Hm."},
    {"role": "assistant", "content": "Hi", "reasoning": "Hm."},
    {"role": "assistant", "content": "Hi", "reasoning_content": "", "reasoning": "Hm."},
]


@pytest.mark.parametrize("message", FORMS, ids=str)
def test_a_template_is_given_what_the_server_gives_it(message: dict[str, Any]) -> None:
    assert template_messages([message], "messages") == [Message.model_validate(message).for_template()]


def test_other_fields_reach_the_template() -> None:
    assert template_messages(({"role": "user", "content": "Hi", "mood": "good"},), "messages") == [
        {"role": "user", "content": "Hi", "mood": "good"}
    ]


def test_the_caller_keeps_its_messages() -> None:
    message = {"role": "assistant", "content": None, "reasoning": "Hm.", "tool_calls": [CALL]}
    before = {**message}
    template_messages([message], "messages")
    assert message == before


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        ({"role": "user"}, "messages[0].content is missing"),
        ({"role": "user", "content": None}, "messages[0].content is missing"),
        ({"role": "tool", "tool_call_id": "a"}, "messages[0].content is missing"),
        ({"role": "user", "content": b"Hi"}, "messages[0].content must be a string or a list of text parts, got b'Hi'"),
        ({"role": "user", "content": 5}, "messages[0].content must be a string or a list of text parts, got 5"),
        ({"role": "user", "content": ["Hi"]}, "messages[0].content[0] must be"),
        (
            {"role": "user", "content": [*PARTS, {"type": "image_url", "image_url": {"url": "x"}}]},
            'messages[0].content[2] must be {"type": "text", "text": "…"}, got type \'image_url\'',
        ),
        ({"role": "user", "content": "Hi", "tool_calls": [CALL]}, "messages[0].tool_calls may be in messages of"),
        ({"role": "assistant", "tool_calls": CALL}, "messages[0].tool_calls must be a list of calls, got an object"),
        ({"role": "assistant", "tool_calls": ["add"]}, "messages[0].tool_calls[0] must hold"),
        ({"role": "assistant", "tool_calls": [{"name": "add"}]}, "messages[0].tool_calls[0] must hold"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": 5}}]},
            "messages[0].tool_calls[0].function.arguments must be JSON text or the object itself, got 5",
        ),
        (
            {"role": "assistant", "tool_calls": [{**CALL, "id": 5}]},
            "messages[0].tool_calls[0].id must be a string, got 5",
        ),
        ({"role": "user", "content": "Hi", "name": 5}, "messages[0].name must be a string, got 5"),
        ({"role": ["user"], "content": "Hi"}, "messages[0].role must be one of"),
        (["user", "Hi"], "messages[0] must be a mapping with role and content"),
    ],
    ids=str,
)
def test_a_bad_message_is_refused_by_name(message: Any, problem: str) -> None:
    with pytest.raises(FieldError) as caught:
        template_messages([message], "messages")
    assert str(caught.value).startswith(problem)


def test_arguments_nested_without_end_stay_text() -> None:
    deep = "[" * 100_000
    function = {"name": "f", "arguments": deep}
    [message] = template_messages([{"role": "assistant", "tool_calls": [{"function": function}]}], "messages")
    assert message["tool_calls"][0]["function"]["arguments"] == deep


@pytest.mark.parametrize(
    ("tools", "problem"),
    [
        ({"type": "function"}, "tools must be a list of tools, got an object"),
        (["add"], "tools[0] must hold"),
        ([{"name": "add"}], "tools[0] must hold"),
        ([{"type": "function", "function": {"name": 5}}], "tools[0] must hold"),
        ([{"type": "web_search"}], "tools must hold a function"),
        ([{"function": {"name": "f", "description": 5}}], "tools[0].function.description must be a string, got 5"),
        (
            [{"function": {"name": "f", "parameters": "a"}}],
            "tools[0].function.parameters must be a JSON schema",
        ),
        ([lambda a: a], "tools[0] cannot be described"),
    ],
)
def test_a_bad_tool_is_refused_by_name(tools: Any, problem: str) -> None:
    with pytest.raises(FieldError) as caught:
        template_tools(tools, "tools")
    assert str(caught.value).startswith(problem)


@pytest.mark.parametrize("content", ["Hi", None, "", [{"type": "refusal", "refusal": "No."}]])
def test_a_refusal_stands_in_for_content(content: Any) -> None:
    message = {"role": "assistant", "content": content, "refusal": "Never."}
    assert template_messages([message], "messages") == [Message.model_validate(message).for_template()]


def test_a_refusal_is_text() -> None:
    with pytest.raises(FieldError, match=r"messages\[0\].refusal must be a string, got 5"):
        template_messages([{"role": "assistant", "content": "Hi", "refusal": 5}], "messages")
