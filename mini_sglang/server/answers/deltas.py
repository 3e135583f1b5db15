"""What an answer is made of: thought, text and tool calls, in the pieces that a stream sends, and folded into a whole.

Plain values. The parsers make them, the formats of the APIs write them down; neither engine nor HTTP is known here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Reasoning:
    """More of the thought that comes before an answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Content:
    """More of the answer's text."""

    text: str


@dataclass(frozen=True, slots=True)
class CallOpening:
    """Tool call number `index` begins."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the arguments of tool call number `index`: its pieces join to a JSON object."""

    index: int
    text: str


Piece = Reasoning | Content | CallOpening | CallArguments


@dataclass(slots=True)
class ToolCall:
    """A whole tool call; `arguments` is JSON text."""

    id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class Answer:
    """All pieces of one answer, folded."""

    content: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)

    @classmethod
    def of(cls, pieces: Iterable[Piece]) -> Answer:
        """Join pieces, which must be in the order in which they came."""
        answer = cls()
        for piece in pieces:
            match piece:
                case Content(text):
                    answer.content += text
                case Reasoning(text):
                    answer.reasoning += text
                case CallOpening(_, call_id, name):
                    answer.calls.append(ToolCall(call_id, name))
                case CallArguments(index, text):
                    answer.calls[index].arguments += text
        return answer
