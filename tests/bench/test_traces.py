"""Traces of the published formats are read; equal hash ids become equal blocks, scaled or not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mini_sglang.bench.traces import TraceRow, read_trace

VOCAB = range(100, 1000)
Write = Callable[[str, list[Any]], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """`write(name, lines)`: a dict becomes a line of JSON."""

    def write(name: str, lines: list[Any]) -> Path:
        path = tmp_path / name
        path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
        return path

    return write


def test_mooncake_counts_milliseconds_and_blocks_of_512(write: Write) -> None:
    first = {"timestamp": 2000, "input_length": 513, "output_length": 7, "hash_ids": [0, 4]}
    later = {"timestamp": 5500, "input_length": 1, "output_length": 1, "hash_ids": [0]}
    assert read_trace(write("trace.jsonl", [later, first])) == [
        TraceRow(0.0, 513, 7, (0, 4), 512),
        TraceRow(3.5, 1, 1, (0,), 512),
    ]


def test_bailian_counts_seconds_and_blocks_of_16_and_knows_conversations(write: Write) -> None:
    root = {"chat_id": 159, "parent_chat_id": -1, "timestamp": 61.5, "input_length": 40, "output_length": 3,
            "type": "text", "turn": 1, "hash_ids": [8, 9]}  # fmt: skip
    turn = {**root, "chat_id": 160, "parent_chat_id": 159, "timestamp": 63.0, "turn": 2, "hash_ids": [8, 9, 10]}
    first, second = read_trace(write("trace.jsonl", [root, turn]))
    assert first == TraceRow(0.0, 40, 3, (8, 9, -1), 16, chat_id=159, parent_chat_id=None)
    assert second == TraceRow(1.5, 40, 3, (8, 9, 10), 16, chat_id=160, parent_chat_id=159)


def test_azure_has_no_equal_blocks(write: Write) -> None:
    lines = [
        "TIMESTAMP,ContextTokens,GeneratedTokens",
        "2023-11-16 18:15:46.6805900,600,44",
        "2023-11-16 18:15:50.9305900,3,0",
    ]
    first, second = read_trace(write("trace.csv", lines))
    assert first == TraceRow(0.0, 600, 44, (-1, -2), 512)
    assert second.timestamp == pytest.approx(4.25)
    assert (second.hash_ids, second.output_length) == ((-3,), 1)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["{}"], "no known trace"),
        ([""], "no known trace"),
        (['{"input_length": 1}'], r"trace:1 is no request of a trace: .*timestamp"),
        (['{"timestamp": 0, "input_length": 0, "output_length": 1}'], "trace:1: lengths must be at least 1, got 0 in"),
        (['{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": [-4]}'], "at least 0, got -4"),
        (["TIMESTAMP,ContextTokens,GeneratedTokens", "yesterday,1,1"], "trace:2 is no request of an Azure trace"),
        (["TIMESTAMP,ContextTokens,GeneratedTokens"], "holds no request"),
    ],
)
def test_what_is_no_trace_is_refused_by_line(write: Write, lines: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_trace(write("trace", lines))


def test_equal_ids_become_equal_blocks() -> None:
    one = TraceRow(0, 30, 1, (5, 6), 16).prompt(VOCAB)
    other = TraceRow(0, 32, 1, (5, 7), 16).prompt(VOCAB)
    assert (len(one), len(other)) == (30, 32)
    assert one[:16] == other[:16]
    assert one[16:] != other[16:30]
    assert set(one + other) <= set(VOCAB)
    assert len(set(one)) > 16


def test_a_seed_gives_other_tokens_with_the_same_blocks_equal() -> None:
    rows = [TraceRow(0, 32, 1, (5, 6), 16), TraceRow(0, 32, 1, (5, -1), 16)]
    one, other = (row.prompt(VOCAB, seed=1) for row in rows)
    assert one[:16] == other[:16]
    assert one[16:] != other[16:]
    assert one[:16] != rows[0].prompt(VOCAB)[:16]


@pytest.mark.parametrize("factor", [0.01, 0.1, 0.37, 1, 3])
def test_scaled_rows_share_what_they_shared(factor: float) -> None:
    rows = [TraceRow(0, length, 9, tuple(range(-(-length // 512))), 512) for length in (1, 512, 513, 5000)]
    scaled = [row.scaled(factor) for row in rows]
    for before, after in zip(rows, scaled, strict=True):
        assert -(-after.input_length // after.block_size) == len(after.hash_ids) == len(before.hash_ids)
        assert after.input_length == pytest.approx(before.input_length * after.block_size / 512, abs=1)
    longest = scaled[-1].prompt(VOCAB)
    assert all(longest[: row.input_length] == row.prompt(VOCAB) for row in scaled)


def test_a_scale_that_leaves_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"scale_length 0\.01 leaves no token of a block of 16; .* at least 0\.0625"):
        TraceRow(0, 30, 1, (5, 6), 16).scaled(0.01)


def test_a_limited_row_keeps_its_beginning() -> None:
    row = TraceRow(0, 40, 9, (1, 2, 3), 16)
    limited = row.limited(max_input=17, max_output=4)
    assert limited == TraceRow(0, 17, 4, (1, 2), 16)
    assert limited.prompt(VOCAB) == row.prompt(VOCAB)[:17]
    assert row.limited() == row
