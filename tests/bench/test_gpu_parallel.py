"""The script that measures several GPUs runs, on a tiny model over CPUs; a part that fails does not stop the others."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import gpu_parallel
from benchmarks.gpu import Figures
from benchmarks.gpu_parallel import Bench


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    with gpu_parallel.bench_of(argparse.Namespace(rehearse=True, tp=2, all_reduce="auto", runs=1)) as bench:
        yield bench


def test_one_rank_and_two_are_timed_on_one_model(bench: Bench, thread_workers: None) -> None:
    figures: Figures = {}
    for new in gpu_parallel.shares(bench):
        figures |= new
    assert list(figures) == ["tp 1", "tp 2"]
    for name in figures:
        assert figures[name]["offline_tok_s"] > 0
        assert 0 < figures[name]["single_of_weights_alone"] < 1
    assert figures["tp 1"]["efficiency"] == {"offline_tok_s": 1, "single_tok_s": 1}
    speeds = [figures[name]["single_tok_s"] for name in figures]
    assert figures["tp 2"]["efficiency"]["single_tok_s"] == pytest.approx(speeds[1] / speeds[0] / 2)


def test_two_ranks_say_what_one_says(bench: Bench, thread_workers: None) -> None:
    figures: Figures = {}
    for new in gpu_parallel.parity(bench):
        figures |= new
    assert figures["tokens"] == bench.num_tokens
    assert figures["equal_greedy"] is True
    assert figures["equal_seeded"] is True
    distances = figures["bfloat16 from float32"]
    assert 0 < distances["decode, all"]["mean"] < 2 * distances["transformers"]["mean"]
    assert 0 < figures["prefill, all from one"]["mean"] < 2 * distances["transformers"]["mean"]


def test_parts_that_take_too_long_are_ended_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "figures.json"
    path.write_text(json.dumps({"card": "a card", "single": {"single_of_weights_alone": 0.8}}))
    options = ["--rehearse", "--only", "offline,parity", "--limit", "1", "--json", str(path)]
    monkeypatch.setattr(sys, "argv", ["gpu_parallel", *options])
    assert gpu_parallel.main() == 1
    output = capfd.readouterr()
    assert "offline did not end within 1 s" in output.err
    assert "parity did not end within 1 s" in output.err
    assert "a card" in output.out, "what earlier calls measured is shown"
