"""An answer as a row of blocks, each a thought, a text or a tool call: how /v1/messages and /v1/responses write it.

Plain values, made from the pieces of the parsers; knows neither API.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from mini_sglang.server.answers.deltas import CallArguments, CallOpening, Content, Piece, Reasoning

Change = Literal["opened", "grown", "closed"]


@dataclass(slots=True, eq=False)
class Block:
    """One block. `text` is what it has so far; of a call, its arguments as JSON text."""

    index: int
    kind: Literal["thought", "text", "call"]
    text: str = ""
    call_id: str = ""
    name: str = ""  # of the function


class Blocks:
    """Puts pieces together to blocks; those of one kind in a row are one, and every call is one of its own."""

    def __init__(self) -> None:
        self.all: list[Block] = []
        self._is_open = False

    def push(self, pieces: Iterable[Piece]) -> Iterator[tuple[Change, Block, str]]:
        """What each piece does: (change, the block, the text that is new)."""
        for piece in pieces:
            match piece:
                case Reasoning(text):
                    yield from self._grow("thought", text)
                case Content(text):
                    yield from self._grow("text", text)
                case CallOpening(_, call_id, name):
                    yield from self._open(Block(len(self.all), "call", call_id=call_id, name=name))
                case CallArguments(_, text):  # of the call that was opened last
                    yield from self._grow("call", text)

    def close(self) -> Iterator[tuple[Change, Block, str]]:
        """The last block ends, if there is one."""
        if self._is_open:
            self._is_open = False
            yield "closed", self.all[-1], ""

    def _grow(self, kind: Literal["thought", "text", "call"], text: str) -> Iterator[tuple[Change, Block, str]]:
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
