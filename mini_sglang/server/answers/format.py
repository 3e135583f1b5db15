"""The protocol of formats: a format writes the answer to one job in the way of its API, whole or as server-sent events.

Each API has one in its folder; `answering.py` walks a job's outputs through it. Knows no API, no engine and no HTTP.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import msgspec

from mini_sglang.outputs import RequestOutput
from mini_sglang.sampling_params import Json
from mini_sglang.server.errors import ApiError

DONE = b"data: [DONE]\n\n"  # the last event of a stream, in the APIs that have one

_encode_json = msgspec.json.Encoder().encode


class AnswerFormat(Protocol):
    """Writes one answer of one or more choices. The events of a stream come as bytes."""

    def whole(self, outputs: Sequence[RequestOutput]) -> object:
        """The JSON value of an answer that is complete. `outputs`: the last of each choice."""
        ...

    def opening(self, choice: int, first: RequestOutput) -> Iterable[bytes]:
        """The events that begin a choice, before those of its first output."""
        return ()

    def delta(self, choice: int, output: RequestOutput) -> Iterator[bytes]:
        """The events of what `output` added to a choice. The work is done as the events are iterated."""
        ...

    def closing(self, outputs: Sequence[RequestOutput]) -> Iterable[bytes]:
        """The events that end a stream. `outputs`: the last of each choice."""
        return (DONE,)

    def failure(self, error: ApiError) -> Iterable[bytes]:
        """The events that end a stream which fails."""
        return (event(error.body()),)


def event(value: Json) -> bytes:
    """One event with a JSON object."""
    return b"data: " + _encode_json(value) + b"\n\n"


def named_event(value: Json) -> bytes:
    """One event with a JSON object, under the name that is its `type`."""
    return b"event: " + str(value["type"]).encode() + b"\n" + event(value)
