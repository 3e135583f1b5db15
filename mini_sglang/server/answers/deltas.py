"""An answer's reasoning, text and tool calls: as the deltas of a stream, and as the blocks that deltas join to.

Plain values: parsers make deltas, the formats of the APIs write deltas or blocks. Knows no API and no engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal


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
Kind = Literal["reasoning", "text", "call"]
Change = Literal["opened", "grown", "closed"]


@dataclass(slots=True, eq=False)
class Block:
    """Reasoning, text or one tool call. `text` is its text so far; for a call, its arguments as JSON text."""

    index: int
    kind: Kind
    text: str = ""
    call_id: str = ""
    name: str = ""  # of the function


class Answer:
    """Joins deltas to blocks: consecutive deltas of one kind make one block, and every call makes its own."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self._is_open = False

    @classmethod
    def of(cls, deltas: Iterable[Delta]) -> Answer:
        """The answer that these deltas join to."""
        answer = cls()
        for _ in answer.push(deltas):
            pass
        return answer

    @property
    def content(self) -> str:
        return "".join(block.text for block in self.blocks if block.kind == "text")

    @property
    def reasoning(self) -> str:
        return "".join(block.text for block in self.blocks if block.kind == "reasoning")

    @property
    def calls(self) -> list[Block]:
        return [block for block in self.blocks if block.kind == "call"]

    def push(self, deltas: Iterable[Delta]) -> Iterator[tuple[Change, Block, str]]:
        """Yield what each delta changes: (change, block, new text)."""
        for delta in deltas:
            match delta:
                case Reasoning(text):
                    yield from self._grow("reasoning", text)
                case Content(text):
                    yield from self._grow("text", text)
                case CallOpening(_, call_id, name):
                    yield from self._open(Block(len(self.blocks), "call", call_id=call_id, name=name))
                case CallArguments(_, text):  # of the call that was opened last
                    yield from self._grow("call", text)

    def close(self) -> Iterator[tuple[Change, Block, str]]:
        """End the last block, if one is open."""
        if self._is_open:
            self._is_open = False
            yield "closed", self.blocks[-1], ""

    def _grow(self, kind: Kind, text: str) -> Iterator[tuple[Change, Block, str]]:
        if not text:
            return
        if not self.blocks or self.blocks[-1].kind != kind:
            yield from self._open(Block(len(self.blocks), kind))
        self.blocks[-1].text += text
        yield "grown", self.blocks[-1], text

    def _open(self, block: Block) -> Iterator[tuple[Change, Block, str]]:
        yield from self.close()
        self.blocks.append(block)
        self._is_open = True
        yield "opened", block, ""
