"""The parts of an answer (reasoning, text, tool calls) as the deltas of a stream, and the answer that deltas join to.

Plain values: parsers make them, the formats of the APIs write them. Knows no engine and no HTTP.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Reasoning:
    """More of the reasoning that comes before the answer's text."""

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
    """More of the arguments of tool call number `index`; all of them join to a JSON object."""

    index: int
    text: str


Delta = Reasoning | Content | CallOpening | CallArguments


@dataclass(slots=True)
class ToolCall:
    """A whole tool call; `arguments` is JSON text."""

    id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class Answer:
    """All deltas of one answer, joined."""

    content: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)

    @classmethod
    def of(cls, deltas: Iterable[Delta]) -> Answer:
        """Join deltas, given in the order in which they came."""
        answer = cls()
        for delta in deltas:
            match delta:
                case Content(text):
                    answer.content += text
                case Reasoning(text):
                    answer.reasoning += text
                case CallOpening(_, call_id, name):
                    answer.calls.append(ToolCall(call_id, name))
                case CallArguments(index, text):
                    answer.calls[index].arguments += text
        return answer
