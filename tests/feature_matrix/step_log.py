"""Reads what an engine did from its step log, whose lines docs/observability.md describes: the evidence of cells."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec


class Chunk(msgspec.Struct, array_like=True):
    """A row that computes part of a prompt, of an answer computed again, or a token and drafted ones behind it."""

    request_id: str
    start: int
    count: int
    samples: bool
    drafted: int = 0
    accepted: int = 0


class Step(msgspec.Struct, tag="step", tag_field="kind"):
    """A step that was read."""

    step: int
    at_us: int
    read_us: int = 0
    predicted_us: int | None = None
    decode_ids: list[str] | None = None  # in the file, None means those of the line before
    chunks: list[Chunk] = []
    admitted: list[str] = []
    preempted: list[str] = []
    used_pages: int = 0

    @property
    def request_ids(self) -> set[str]:
        return {*(self.decode_ids or ()), *(chunk.request_id for chunk in self.chunks)}


@dataclass(frozen=True)
class Steps:
    """The steps of one cell, in the order in which they were read."""

    steps: list[Step]
    config: Mapping[str, object]  # of the engine, every `auto` resolved

    def chunks_of(self, request_ids: Collection[str]) -> list[Chunk]:
        return [chunk for step in self.steps for chunk in step.chunks if chunk.request_id in request_ids]

    def numbers_of(self, request_ids: Collection[str]) -> list[int]:
        """The numbers of the steps that contain one of these requests."""
        return [step.step for step in self.steps if not step.request_ids.isdisjoint(request_ids)]

    def num_decodes(self, request_ids: Collection[str]) -> int:
        """Rows that computed one token of these requests and sampled the next."""
        return sum(name in request_ids for step in self.steps for name in step.decode_ids or ())

    @property
    def admitted(self) -> list[str]:
        """Requests in the order in which they began to run; again after a preemption."""
        return [name for step in self.steps for name in step.admitted]

    @property
    def preempted(self) -> list[str]:
        return [name for step in self.steps for name in step.preempted]

    @property
    def peak_used_pages(self) -> int:
        return max(step.used_pages for step in self.steps)


class _Header(msgspec.Struct, tag="header", tag_field="kind"):
    config: dict[str, object]


class _Arrived(msgspec.Struct, tag="arrived", tag_field="kind"):
    pass


class _Ended(msgspec.Struct, tag="ended", tag_field="kind"):
    pass


_decode = msgspec.json.Decoder(_Header | _Arrived | _Ended | Step).decode


def read_steps(path: Path, after: int) -> Steps:
    """The steps with numbers above `after`, as far as they have been written."""
    header, *lines = map(_decode, path.read_bytes().splitlines())
    assert isinstance(header, _Header)
    steps = [line for line in lines if isinstance(line, Step)]
    decode_ids: list[str] = []
    for step in steps:
        decode_ids = step.decode_ids = decode_ids if step.decode_ids is None else step.decode_ids
    return Steps([step for step in steps if step.step > after], header.config)
