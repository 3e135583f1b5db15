"""Conversations and tools as callers of `LLM` write them, made into what chat templates take: the forms of HTTP too.

Checks roles and the fields that it knows. Others go to the template as they are. Knows no template.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

import msgspec

from mini_sglang.errors import FieldError, shorten
from mini_sglang.sampling_params import Json

ROLES = ("system", "developer", "user", "assistant", "tool")


def is_list(value: object) -> TypeGuard[Sequence[Any]]:
    """Whether a caller may have meant a list: texts and bytes are sequences too, and meant as one."""
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray, memoryview))


def template_messages(messages: object, name: str) -> list[Json]:
    """The messages of one conversation as templates take them. Raises FieldError that begins with `name`.

    Content may be a list of text parts, and null or absent in an assistant's message; arguments of tool calls may be
    JSON text; `developer` is another word for `system`, `reasoning` for `reasoning_content`; null is an absent field.
    """
    if not is_list(messages):
        raise FieldError(name, f"must be a list of messages, got {shorten(messages)}")
    if not messages:
        raise FieldError(name, "must not be empty")
    return [_message(message, f"{name}[{index}]") for index, message in enumerate(messages)]


def template_tools(tools: object, name: str) -> list[Json]:
    """The tools as templates take them. Raises FieldError that begins with `name`.

    A tool may be a Python function with annotations and a docstring. Tools that only their vendor runs, of other types,
    are left out, as long as a function is left.
    """
    if tools is None:
        return []
    if not isinstance(tools, (list, tuple)):
        raise FieldError(name, f"must be a list of tools, got {shorten(tools)}")
    made = [_tool(tool, f"{name}[{index}]") for index, tool in enumerate(tools) if not _is_foreign(tool)]
    if tools and not made:
        raise FieldError(name, "must hold a function: no other tool can be run here")
    return made


def call_arguments(arguments: str | Mapping[str, Any] | None) -> Any:
    """The object of a call's arguments, which templates expect; text that is no JSON object stays as it is."""
    if not isinstance(arguments, str):
        return dict(arguments or {})
    if not arguments:
        return {}
    with contextlib.suppress(msgspec.DecodeError, RecursionError, UnicodeEncodeError):
        return msgspec.json.decode(arguments, type=Json)
    return arguments


def _is_foreign(tool: object) -> bool:
    return isinstance(tool, Mapping) and isinstance(kind := tool.get("type"), str) and kind != "function"


def _tool(tool: object, name: str) -> Json:
    if callable(tool):
        from transformers.utils import get_json_schema  # not above: it takes a second

        try:
            return dict(get_json_schema(tool))
        except Exception as error:  # of annotations or a docstring, for which the library has errors of its own
            raise FieldError(name, f"cannot be described: {error}") from error
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise FieldError(name, f'must hold {{"function": {{"name": …, "parameters": …}}}}, got {shorten(tool)}')
    description, parameters = function.get("description"), function.get("parameters")
    if not isinstance(description, (str, type(None))):
        raise FieldError(f"{name}.function.description", f"must be a string, got {shorten(description)}")
    if not isinstance(parameters, (Mapping, type(None))):
        raise FieldError(f"{name}.function.parameters", f"must be a JSON schema, got {shorten(parameters)}")
    made: Json = {"name": function["name"]}
    if description is not None:
        made["description"] = description
    made["parameters"] = dict(parameters or {"type": "object", "properties": {}})
    return {"type": "function", "function": made}


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
    refusal = given.pop("refusal", "")  # what the assistant said in place of content
    if not isinstance(refusal, str):
        raise FieldError(f"{name}.refusal", f"must be a string, got {shorten(refusal)}")
    given["content"] = _content(given.get("content", ""), f"{name}.content") or refusal
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
        kind = part.get("type") if isinstance(part, Mapping) else part
        text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, Mapping) else None
        if kind not in ("text", "refusal") or not isinstance(text, str):
            raise FieldError(f"{name}[{index}]", f'must be {{"type": "text", "text": "…"}}, got type {shorten(kind)}')
        texts.append(text)
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
    made = {"name": function["name"], "arguments": call_arguments(arguments)}
    return {"id": call_id or "", "type": "function", "function": made}
