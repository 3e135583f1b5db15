"""Recorded traffic: when requests came, how long they were, and which blocks of their prompts were equal.

Published traces hold no text. A prompt is made up from its hash ids, so that equal ids become equal blocks of tokens at
equal positions: `block_tokens`. Knows files and integers; neither servers nor caches.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import numpy as np


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request of a trace.

    `hash_ids` has one id for each block of `block_size` prompt tokens, the last of which may be partial; a block
    that the trace names no id for (all of Azure's) has a negative one of its own, so it equals no other.
    """

    timestamp: float  # seconds since the first request
    input_length: int  # prompt tokens
    output_length: int  # generated tokens
    hash_ids: tuple[int, ...]
    block_size: int  # tokens
    chat_id: int | None = None
    parent_chat_id: int | None = None  # the turn of the same conversation before this one

    def scaled(self, factor: float) -> TraceRow:
        """The same request with lengths times about `factor`, and the same blocks equal.

        Blocks stay whole tokens: prompts shrink by the nearest factor that does this. Raises ValueError if not even
        one token would be left of a block.
        """
        block_size = round(self.block_size * factor)
        if block_size < 1:
            raise ValueError(
                f"scale_length {factor} leaves no token of a block of {self.block_size}; "
                f"it must be at least {1 / self.block_size}"
            )
        input_length = -(-self.input_length * block_size // self.block_size)
        output_length = max(1, round(self.output_length * factor))
        return replace(self, input_length=input_length, output_length=output_length, block_size=block_size)

    def limited(self, max_input: int | None = None, max_output: int | None = None) -> TraceRow:
        """The request cut to the first `max_input` prompt tokens and to `max_output` generated ones."""
        input_length = min(self.input_length, max_input or self.input_length)
        return replace(
            self,
            input_length=input_length,
            output_length=min(self.output_length, max_output or self.output_length),
            hash_ids=self.hash_ids[: -(-input_length // self.block_size)],
        )

    def prompt(self, vocab: range, seed: int = 0) -> list[int]:
        """`input_length` token ids of `vocab`; another `seed` gives other tokens with the same blocks equal."""
        tokens: list[int] = block_tokens(self.hash_ids, self.block_size, vocab, seed)[: self.input_length].tolist()
        return tokens


def block_tokens(hash_ids: Sequence[int], block_size: int, vocab: range, seed: int = 0) -> np.ndarray[Any, Any]:
    """The tokens of blocks, uint64 of shape [len(hash_ids) * block_size]: a function of id, position, and `seed`."""
    # Each cell has a number of its own; the finaliser of splitmix64 (Steele, Lea, Flood 2014) scatters these.
    starts: np.ndarray[Any, Any] = np.asarray(hash_ids, np.int64).astype(np.uint64) * np.uint64(block_size)
    mixed: np.ndarray[Any, Any] = (starts[:, None] + np.arange(block_size, dtype=np.uint64)).ravel()
    mixed += np.uint64(seed * 0x9E3779B97F4A7C15 % (1 << 64))
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        mixed ^= mixed >> np.uint64(shift)
        mixed *= np.uint64(factor)
    mixed %= np.uint64(len(vocab))
    return mixed + np.uint64(vocab.start)


def read_trace(path: Path) -> list[TraceRow]:
    """The requests of a trace in the order of their arrival; its first line tells the format.

    Mooncake: JSONL with `timestamp` (ms), `input_length`, `output_length` and one of `hash_ids` per 512 tokens.
    Qwen-Bailian: JSONL with `timestamp` (s), the same lengths, `hash_ids` per 16 tokens, `chat_id` and
    `parent_chat_id` (-1: none).
    Azure: CSV with TIMESTAMP, ContextTokens and GeneratedTokens.
    Raises ValueError that names file and line for what cannot be read.
    """
    with path.open(encoding="utf-8") as file:
        first = file.readline()
    if "ContextTokens" in first:
        rows = list(_read_azure(path))
    elif "input_length" in first:
        is_bailian = "chat_id" in first
        rows = list(_read_json_lines(path, _Blocks(16 if is_bailian else 512), units=1 if is_bailian else 1000))
    else:
        raise ValueError(f"{path} is no known trace: its first line is {first[:80]!r}")
    if not rows:
        raise ValueError(f"{path} holds no request")
    rows.sort(key=lambda row: row.timestamp)
    start = rows[0].timestamp
    return [replace(row, timestamp=row.timestamp - start) for row in rows]


class _Line(msgspec.Struct):
    """A request in JSON; the chats are Bailian's."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int] = []
    chat_id: int | None = None
    parent_chat_id: int = -1


def _read_json_lines(path: Path, blocks: _Blocks, units: int) -> Iterator[TraceRow]:
    """The request of each line that is not blank; a second is `units` units of the timestamps."""
    decode = msgspec.json.Decoder(_Line).decode
    with path.open("rb") as file:
        for number, text in enumerate(file, start=1):
            if text.isspace():
                continue
            try:
                line = decode(text)
            except msgspec.DecodeError as error:
                raise ValueError(f"{path}:{number} is no request of a trace: {error}") from error
            where, seconds = f"{path}:{number}", line.timestamp / units
            row = blocks.row(where, seconds, line.input_length, line.output_length, line.hash_ids)
            parent = None if line.parent_chat_id < 0 else line.parent_chat_id
            yield replace(row, chat_id=line.chat_id, parent_chat_id=parent)


def _read_azure(path: Path) -> Iterator[TraceRow]:
    blocks = _Blocks(512)
    with path.open(encoding="utf-8", newline="") as file:
        for number, record in enumerate(csv.DictReader(file), start=2):
            where = f"{path}:{number}"
            try:
                timestamp = datetime.fromisoformat(record["TIMESTAMP"]).timestamp()
                lengths = int(record["ContextTokens"]), int(record["GeneratedTokens"])
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"{where} is no request of an Azure trace: {error}") from error
            yield blocks.row(where, timestamp, *lengths, [])


class _Blocks:
    """Makes rows of one format and gives blocks without an id one of their own."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._num_fresh = 0

    def row(self, where: str, timestamp: float, input_length: int, output_length: int, hash_ids: list[int]) -> TraceRow:
        if input_length < 1 or output_length < 0:
            raise ValueError(f"{where}: lengths must be at least 1, got {input_length} in and {output_length} out")
        if hash_ids and min(hash_ids) < 0:
            raise ValueError(f"{where}: hash_ids must be at least 0, got {min(hash_ids)}")
        num_blocks = -(-input_length // self._block_size)
        ids = hash_ids[:num_blocks]
        num_missing = num_blocks - len(ids)
        ids += range(-self._num_fresh - 1, -self._num_fresh - num_missing - 1, -1)
        self._num_fresh += num_missing
        return TraceRow(timestamp, input_length, max(1, output_length), tuple(ids), self._block_size)
