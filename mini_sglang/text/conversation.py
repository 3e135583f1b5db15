"""Conversations as callers of `LLM` write them, made into what chat templates take: the forms that HTTP takes too.

Checks roles and the fields that it knows. Others go to the template as they are. Knows no template.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from mini_sglang.errors import FieldError, shorten
from mini_sglang.sampling_params import Json

ROLES = ("system", "developer", "user", "assistant", "tool")


def template_messages(messages: object, name: str) -> list[Json]:
    """The messages of one conversation as templates take them. Raises FieldError that begins with `name`.

    Content may be a list of text parts, and null or absent in an assistant's message; arguments of tool calls may be
    JSON text; `developer` is another word for `system`, `reasoning` for `reasoning_content`; null is an absent field.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes, bytearray)):
        raise FieldError(name, f"must be a list of messages, got {shorten(messages)}")
    if not messages:
        raise FieldError(name, "must not be empty")
    return [_message(message, f"{name}[{index}]") for index, message in enumerate(messages)]


def _message(message: object, name: str) -> Json:
    if not isinstance(message, Mapping):
        raise FieldError(name, f"must be a mapping with role and content, got {shorten(message)}")
    given = {key: value for key, value in message.items() if value is not None}
    role = given.get("role")
    if role not in ROLES:  # most templates would write any role into the prompt
        raise FieldError(f"{name}.role", f"must be one of {', '.join(ROLES)}, got {shorten(role)}")
    if role != "assistant" and "content" not in given:
        raise FieldError(f"{name}.content", f"is missing, which only the role assistant may leave out, not {role}")
    for key in ("name", "tool_call_id", "reasoning_content", "reasoning"):
        if not isinstance(given.get(key, ""), str):
            raise FieldError(f"{name}.{key}", f"must be a string, got {shorten(given[key])}")
    given["role"] = "system" if role == "developer" else role
    given["content"] = _content(given.get("content", ""), f"{name}.content")
    if reasoning := given.pop("reasoning_content", "") or given.get("reasoning"):
        given["reasoning_content"] = reasoning
    given.pop("reasoning", None)
    if calls := given.pop("tool_calls", None):
        if role != "assistant":
            raise FieldError(f"{name}.tool_calls", f"may be in messages of the role assistant alone, not of {role}")
        given["tool_calls"] = _calls(calls, f"{name}.tool_calls")
    return given


def _content(content: object, name: str) -> str:
    """The text, or the text that the parts make without separators."""
    if isinstance(content, str):
        return content
    if not isinstance(content, (list, tuple)):
        raise FieldError(name, f"must be a string or a list of text parts, got {shorten(content)}")
    texts = []
    for index, part in enumerate(content):
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, Mapping) else part
            raise FieldError(f"{name}[{index}]", f'must be {{"type": "text", "text": "…"}}, got type {shorten(kind)}')
        texts.append(part["text"])
    return "".join(texts)


def _calls(calls: object, name: str) -> list[Json]:
    if not isinstance(calls, (list, tuple)):
        raise FieldError(name, f"must be a list of calls, got {shorten(calls)}")
    return [_call(call, f"{name}[{index}]") for index, call in enumerate(calls)]


def _call(call: object, name: str) -> Json:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise FieldError(name, f'must hold {{"function": {{"name": …, "arguments": …}}}}, got {shorten(call)}')
    call_id, arguments = call.get("id"), function.get("arguments")
    if not isinstance(call_id, (str, type(None))):
        raise FieldError(f"{name}.id", f"must be a string, got {shorten(call_id)}")
    if not isinstance(arguments, (str, Mapping, type(None))):
        raise FieldError(
            f"{name}.function.arguments", f"must be JSON text or the object itself, got {shorten(arguments)}"
        )
    made = {"name": function["name"], "arguments": _arguments(arguments)}
    return {"id": call_id or "", "type": "function", "function": made}


def _arguments(arguments: str | Mapping[str, Any] | None) -> Any:
    """The object, which templates expect; text that is none stays as it is."""
    if not isinstance(arguments, str):
        return dict(arguments or {})
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments
