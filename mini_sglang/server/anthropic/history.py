"""The conversation in the bodies of Anthropic's API: turns of blocks, which become the messages of a chat.

Clients send answers back as they got them, from Anthropic's servers too. What only those can read or run (encrypted
reasoning, their own tools and their results) is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from mini_sglang.sampling_params import Json
from mini_sglang.server import chat, fields
from mini_sglang.server.bodies import HistoryPart

_LEFT_OUT = frozenset(
    {
        "redacted_thinking",
        "fallback",
        "server_tool_use",
        "advisor_tool_result",
        "bash_code_execution_tool_result",
        "code_execution_tool_result",
        "text_editor_code_execution_tool_result",
        "tool_search_tool_result",
        "web_fetch_tool_result",
        "web_search_tool_result",
        "mcp_tool_listing",
        "mcp_tool_result",
        "mcp_tool_use",
    }
)


class TextBlock(HistoryPart):
    type: Literal["text"]
    text: str
    cache_control: fields.Ignored = None
    citations: fields.Ignored = None


class ThinkingBlock(HistoryPart):
    """Reasoning of an earlier answer; the chat template decides whether the model sees it again."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None
    cache_control: fields.Ignored = None


class ToolUseBlock(HistoryPart):
    """A call of an earlier answer."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: Json
    cache_control: fields.Ignored = None
    caller: fields.Ignored = None
    toolset_name: fields.Ignored = None


def _readable(content: Any) -> Any:
    """A list of blocks without those that are left out, and with the text of those that are text in another form."""
    if not isinstance(content, list) or len(content) > fields.MAX_MESSAGES:
        return content
    return [_as_text(block) for block in content if fields.kind_of(block) not in _LEFT_OUT]


def _as_text(block: Any) -> Any:
    match block:
        case {"type": "compaction"}:  # the summary of what came before
            text = block.get("content") or ""
        case {"type": "document", "source": {"type": "text", "data": text}}:
            text = "\n".join(str(part) for part in (block.get("title"), block.get("context"), text) if part)
        case {"type": "search_result", "content": list(parts)}:
            texts = [part.get("text") for part in parts if isinstance(part, dict)]
            text = "\n".join(str(part) for part in (block.get("title"), block.get("source"), *texts) if part)
        case {"type": "tool_reference", "tool_name": text}:  # found by a search; the model knows all tools anyway
            pass
        case _:
            return block
    return {"type": "text", "text": text}


class ToolResultBlock(HistoryPart):
    """The result of a call. A chat has no field for an error, so the text says that the call failed."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Annotated[fields.Content | None, BeforeValidator(_readable)] = None
    is_error: bool | None = None
    cache_control: fields.Ignored = None
    toolset_name: fields.Ignored = None

    def for_chat(self) -> chat.Message:
        content = f"Error: {self.content or ''}" if self.is_error else self.content or ""
        return chat.Message(role="tool", content=content, tool_call_id=self.tool_use_id)


Block = Annotated[TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")]


def _as_blocks(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else _readable(content)


BlockList = Annotated[
    list[Block],
    fields.FAIL_FAST,
    fields.at_most(fields.MAX_MESSAGES),
    BeforeValidator(_as_blocks, json_schema_input_type=str | list[Block]),
]


class Turn(HistoryPart):
    """One message. Consecutive messages of one role become one turn."""

    role: Literal["system", "user", "assistant"]
    content: BlockList
    clear_at: Literal["next_user_message", "never"] | None = None  # of the system's

    def blocks(self, kind: type[HistoryPart]) -> Iterator[Any]:
        return (block for block in self.content if isinstance(block, kind))

    @property
    def text(self) -> str:
        return "".join(block.text for block in self.blocks(TextBlock))


Turns = Annotated[list[Turn], Field(min_length=1), fields.FAIL_FAST, fields.at_most(fields.MAX_MESSAGES)]


def chat_messages_of(turns: Sequence[Turn]) -> Iterator[chat.Message]:
    """The messages of a chat: results of tools come before the user's text."""
    last_of_user = max((index for index, turn in enumerate(turns) if turn.role == "user"), default=-1)
    for index, turn in enumerate(turns):
        if turn.clear_at != "next_user_message" or index > last_of_user:
            yield from _messages_of(turn)


def _messages_of(turn: Turn) -> Iterator[chat.Message]:
    if turn.role == "assistant":
        calls = [
            chat.MessageCall(id=block.id, function=chat.CalledFunction(name=block.name, arguments=block.input))
            for block in turn.blocks(ToolUseBlock)
        ]
        reasoning = "".join(block.thinking for block in turn.blocks(ThinkingBlock)) or None
        yield chat.Message(role="assistant", content=turn.text, tool_calls=calls or None, reasoning_content=reasoning)
        return
    for block in turn.blocks(ToolResultBlock):
        yield block.for_chat()
    if any(turn.blocks(TextBlock)) or not turn.content:
        yield chat.Message(role=turn.role, content=turn.text)
