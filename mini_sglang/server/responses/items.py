"""The conversation in the body of OpenAI's /v1/responses: items, which become the messages of a chat.

Clients send answers back as they got them, from OpenAI's servers too. Calls of tools that the client ran become calls
of functions; what the vendor ran, and reasoning that only it can read, is left out.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from mini_sglang.sampling_params import Json
from mini_sglang.server import chat, fields
from mini_sglang.server.bodies import HistoryPart

_LEFT_OUT = frozenset(
    {
        "code_interpreter_call",
        "file_search_call",
        "image_generation_call",
        "mcp_approval_request",
        "mcp_approval_response",
        "mcp_call",
        "mcp_list_tools",
        "web_search_call",
    }
)
_CALLS = {  # of tools that the client ran: the field with the arguments
    "apply_patch_call": "operation",
    "custom_tool_call": "input",
    "local_shell_call": "action",
    "shell_call": "action",
    "tool_search_call": "arguments",
}
_RESULTS = {  # the field with the result
    "apply_patch_call_output": "output",
    "custom_tool_call_output": "output",
    "local_shell_call_output": "output",
    "shell_call_output": "output",
    "tool_search_output": "tools",
}


def _typed_items(value: Any) -> Any:
    """Give every item its type, which messages may leave out. A string is a message of the user."""
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": value}]
    if not isinstance(value, list) or len(value) > fields.MAX_MESSAGES:
        return value
    items = ({"type": "message", **item} if isinstance(item, dict) else item for item in value)
    return [_as_function(item) for item in items if fields.kind_of(item) not in _LEFT_OUT]


def _as_function(item: Any) -> Any:
    """The call of a vendor's tool, or its result, as that of a function; other items as they are."""
    kind = fields.kind_of(item)
    common = {name: item[name] for name in ("call_id", "status") if item.get(name) is not None} if kind else {}
    if kind in _CALLS:
        arguments = json.dumps({_CALLS[kind]: item.get(_CALLS[kind])})
        name = item.get("name") or kind.removesuffix("_call")
        return {**common, "type": "function_call", "name": name, "arguments": arguments}
    if kind in _RESULTS:
        if kind == "local_shell_call_output" and isinstance(item.get("id"), str):
            common = {"call_id": item["id"], **common}  # its only name of the call in OpenAI's description
        result = item.get(_RESULTS[kind])
        is_text = isinstance(result, str) or kind == "custom_tool_call_output"
        return {**common, "type": "function_call_output", "output": result if is_text else json.dumps(result)}
    return item


Parts = Annotated[
    str, fields.text_parts("input_text", "output_text", "reasoning_text", "summary_text", "text", "refusal")
]
Status = Literal["in_progress", "completed", "incomplete"]


class InputMessage(HistoryPart):
    """A message of the conversation. A message of an earlier answer may keep all fields that it had there."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Parts
    id: str | None = None
    status: Status | None = None
    phase: Literal["commentary", "final_answer"] | None = None


class InputReasoning(HistoryPart):
    """Reasoning of an earlier answer; the chat template decides whether the model sees it again."""

    type: Literal["reasoning"]
    content: Parts | None = None
    summary: list[Json] | None = None
    encrypted_content: fields.Ignored = None  # only its vendor can read it
    id: str | None = None
    status: Status | None = None


class InputCall(HistoryPart):
    """A call of an earlier answer."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: Status | None = None
    caller: fields.Ignored = None
    namespace: fields.Ignored = None


class InputCallOutput(HistoryPart):
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: str
    output: Parts
    id: str | None = None
    status: Status | None = None
    caller: fields.Ignored = None
    name: fields.Ignored = None
    namespace: fields.Ignored = None


InputItem = Annotated[InputMessage | InputReasoning | InputCall | InputCallOutput, Field(discriminator="type")]
InputItems = Annotated[
    list[InputItem],
    Field(min_length=1),
    fields.FAIL_FAST,
    fields.at_most(fields.MAX_MESSAGES),
    BeforeValidator(_typed_items, json_schema_input_type=str | list[InputItem]),
]


def chat_message_of(item: InputMessage | InputReasoning | InputCall | InputCallOutput) -> chat.Message:
    """The message of a chat that says the same."""
    match item:
        case InputMessage():
            return chat.Message(role=item.role, content=item.content)
        case InputReasoning():
            return chat.Message(role="assistant", reasoning_content=item.content)
        case InputCall():
            call = chat.MessageCall(
                id=item.call_id, function=chat.CalledFunction(name=item.name, arguments=item.arguments)
            )
            return chat.Message(role="assistant", tool_calls=[call])
        case InputCallOutput():
            return chat.Message(role="tool", content=item.output, tool_call_id=item.call_id)
