"""An answer as a list of blocks, each of reasoning, text or one tool call, as /v1/messages and /v1/responses have it.

Plain values, made from the deltas of the parsers. Knows neither API.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from mini_sglang.server.answers.deltas import CallArguments, CallOpening, Content, Delta, Reasoning

Change = Literal["opened", "grown", "closed"]


@dataclass(slots=True, eq=False)
class Block:
    """One block. `text` is its text so far; for a call, its arguments as JSON text."""

    index: int
    kind: Literal["reasoning", "text", "call"]
    text: str = ""
    call_id: str = ""
    name: str = ""  # of the function


class Blocks:
    """Joins deltas to blocks: consecutive deltas of one kind make one block, and every call makes its own."""

    def __init__(self) -> None:
        self.all: list[Block] = []
        self._is_open = False

    def push(self, deltas: Iterable[Delta]) -> Iterator[tuple[Change, Block, str]]:
        """Yield what each delta changes: (change, block, new text)."""
        for delta in deltas:
            match delta:
                case Reasoning(text):
                    yield from self._grow("reasoning", text)
                case Content(text):
                    yield from self._grow("text", text)
                case CallOpening(_, call_id, name):
                    yield from self._open(Block(len(self.all), "call", call_id=call_id, name=name))
                case CallArguments(_, text):  # of the call that was opened last
                    yield from self._grow("call", text)

    def close(self) -> Iterator[tuple[Change, Block, str]]:
        """End the last block, if one is open."""
        if self._is_open:
            self._is_open = False
            yield "closed", self.all[-1], ""

    def _grow(self, kind: Literal["reasoning", "text", "call"], text: str) -> Iterator[tuple[Change, Block, str]]:
        if not text:
            return
        if not self.all or self.all[-1].kind != kind:
            yield from self._open(Block(len(self.all), kind))
        self.all[-1].text += text
        yield "grown", self.all[-1], text

    def _open(self, block: Block) -> Iterator[tuple[Change, Block, str]]:
        yield from self.close()
        self.all.append(block)
        self._is_open = True
        yield "opened", block, ""
