"""The step log: a line of JSON for every step of an engine, and for every request that arrives or ends.

The lines are the structs below. All times are whole microseconds since the log began. Lines are buffered, so a step
costs no system call; a full disk ends the log, not the engine. Knows neither engine nor tensors.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from mini_sglang.outputs import FinishReason

logger = logging.getLogger(__name__)

VERSION = 1
_BUFFER_BYTES = 1 << 18


class Header(msgspec.Struct, kw_only=True, tag="header", tag_field="kind"):
    """The first line."""

    version: int = VERSION
    began: float  # Unix time of 0 µs
    config: dict[str, Any]  # of the engine, every `auto` resolved


class Arrived(msgspec.Struct, kw_only=True, tag="arrived", tag_field="kind"):
    """A request was queued. Ids may be used again once their request has ended."""

    at_us: int
    request_id: str
    prompt_tokens: int


class Ended(msgspec.Struct, kw_only=True, tag="ended", tag_field="kind"):
    """A request ended. Steps launched before may still contain it; what they sample for it is dropped."""

    at_us: int
    request_id: str
    reason: FinishReason


class Chunk(msgspec.Struct, array_like=True):
    """A row that is not one of `decodes`: part of a prompt or of an answer computed again, or a token and drafts."""

    request_id: str
    start: int  # the first of its tokens that the step computes; the cached ones are before it
    count: int
    samples: bool  # the step computes the last known token, and samples the next
    drafted: int = 0  # of `count`: tokens behind the last known one, which are verified
    accepted: int = 0  # of these, beside the one token that every such row adds to the answer


class Step(msgspec.Struct, kw_only=True, tag="step", tag_field="kind", omit_defaults=True):
    """A step, once it was read. With run-ahead the next one was launched before; lines are in the order of reading.

    `host_us` has the four phases: "schedule" (from `at_us` on), "launch", "wait" for the result and "update" (up to
    `read_us`). On a CPU the model computes in "launch".
    """

    step: int
    at_us: int
    read_us: int = 0
    host_us: dict[str, int]
    device_us: int | None = None  # on a GPU: from the step's start on the device until its tokens were on the host
    predicted_us: int | None = None  # with max_step_ms or speculative: how long this work was expected to take
    tokens: int = 0  # computed in all: one for each of the decodes, and those of the chunks
    decodes: int = 0  # rows that compute one token of an answer and sample the next; all other rows are in `chunks`
    decode_ids: tuple[str, ...] | None = None  # the requests of `decodes`; left out if the previous step had the same
    chunks: list[Chunk] = []
    admitted: list[str] = []  # requests of `chunks` that take a slot with this step
    preempted: list[str] = []  # requests that gave their pages back since the previous step
    running: int = 0  # requests, once the step was scheduled; the next four are of that moment too
    waiting: int = 0
    free_pages: int = 0
    cached_pages: int = 0
    used_pages: int = 0
    error: str | None = None  # why the step failed


Line = Header | Arrived | Ended | Step


class StepLog:
    """Writes a log to `path`, replacing what is there. Raises OSError if it cannot be opened."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._file = Path(path).open("wb", buffering=_BUFFER_BYTES)  # noqa: SIM115  # closed by `close`
        self._encode = msgspec.json.Encoder().encode

    def write(self, line: Line) -> None:
        """Add a line. It is in the file after the next `flush`, or when the buffer is full."""
        if not self._file.closed:
            try:
                self._file.write(self._encode(line) + b"\n")
            except OSError as error:
                self._give_up(error)

    def flush(self) -> None:
        if not self._file.closed:
            try:
                self._file.flush()
            except OSError as error:
                self._give_up(error)

    def close(self) -> None:
        """Write what is buffered. Lines written afterwards are dropped."""
        self.flush()
        self._file.close()

    def _give_up(self, error: OSError) -> None:
        logger.error("the step log %s ends here: %s", self._path, error)
        with contextlib.suppress(OSError):  # what is still in the buffer has no place to go to
            self._file.close()


def read_lines(path: str | Path) -> Iterator[Line]:
    """The lines of a log, the header first. A last line that is cut off, as when a process was killed, is dropped.

    Raises OSError, and ValueError that names the line if the file is not a log of this version.
    """
    decode = msgspec.json.Decoder(Line).decode
    with Path(path).open("rb") as file:
        for number, text in enumerate(file, 1):
            if not text.endswith(b"\n") and number > 1:
                return
            try:
                line = decode(text)
            except msgspec.DecodeError as error:
                raise ValueError(f"{path} is not a step log: line {number}: {error}") from error
            if (number == 1) != isinstance(line, Header):
                raise ValueError(f"{path} is not a step log: line {number} is {'not a' if number == 1 else 'a'} header")
            if isinstance(line, Header) and line.version != VERSION:
                raise ValueError(f"{path} is a step log of version {line.version}, and this program reads {VERSION}")
            yield line
