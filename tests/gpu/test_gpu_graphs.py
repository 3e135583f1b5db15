"""Graphs and overlap change the speed alone: captured sizes, batches between them, and bits in bfloat16."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from mini_sglang.execution.cuda_graph import DecodeGraphs, StepGraphs, graph_sizes
from mini_sglang.execution.executor import Executor
from mini_sglang.execution.prefill_graph import PrefillGraphs
from mini_sglang.sampling_params import SamplingParams
from tests.gpu.conftest import MODES, Expected, run_on_gpu
from tests.tiny import TinyCheckpoint, generate_ids, run_all

pytestmark = pytest.mark.gpu


def prompts_of(count: int, seed: int = 0) -> list[list[int]]:
    """Distinct prompts of 1 to 60 tokens."""
    rng = random.Random(seed)
    return [[rng.randrange(3, 320) for _ in range(rng.randint(1, 60))] for _ in range(count)]


def test_every_batch_size_equals_no_graphs(tiny_model: TinyCheckpoint, expected: Expected) -> None:
    limit = 21
    prompts = prompts_of(limit)
    with (
        run_on_gpu(tiny_model.path, max_running_requests=limit) as graphs,
        run_on_gpu(tiny_model.path, max_running_requests=limit, cuda_graph_max_bs=0) as eager,
    ):
        for size in range(1, limit + 1):
            got = generate_ids(graphs, prompts[:size], num_tokens=6)
            assert got == generate_ids(eager, prompts[:size], num_tokens=6), f"batch of {size}"
            assert got == [expected(prompt, 6) for prompt in prompts[:size]], f"batch of {size}"


@pytest.mark.parametrize("arrivals", [12, 1])
def test_prompt_and_decode_steps_are_replays(
    tiny_model: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch, arrivals: int
) -> None:
    """Twelve prompts at once, then one by one beside the decodes of those before: each step is one replay."""
    counts: Counter[str] = Counter()

    def count(owner: Any, method: str) -> None:
        plain = getattr(owner, method)

        def counting(self: Any, *arguments: Any) -> Any:
            counts[owner.__name__] += 1
            return plain(self, *arguments)

        monkeypatch.setattr(owner, method, counting)

    with run_on_gpu(tiny_model.path) as engine:
        for owner, method in ((Executor, "launch"), (PrefillGraphs, "replay"), (DecodeGraphs, "replay")):
            count(owner, method)
        count(StepGraphs, "replay")
        generate_ids(engine, prompts_of(12), num_tokens=6, arrivals=arrivals)
    assert counts["PrefillGraphs"] >= 12 // arrivals
    assert counts["DecodeGraphs"] >= 5
    assert counts["PrefillGraphs"] + counts["DecodeGraphs"] == counts["StepGraphs"] == counts["Executor"]


@pytest.mark.parametrize("largest_graph", [8, 16])
def test_twelve_requests_between_two_captured_sizes(
    tiny_model: TinyCheckpoint, expected: Expected, mode: dict[str, Any], largest_graph: int
) -> None:
    """Answers of 3 to 25 tokens: the batch shrinks from twelve rows, padded to 16 or too many, through every size."""
    assert {8, 16} <= set(graph_sizes(16))
    assert not {9, 10, 11, 12, 13, 14, 15} & set(graph_sizes(16))
    prompts = prompts_of(12, seed=1)
    lengths = [3 + 2 * index for index in range(12)]
    params = [SamplingParams(temperature=0, max_tokens=length, ignore_eos=True) for length in lengths]
    with run_on_gpu(tiny_model.path, **{"cuda_graph_max_bs": largest_graph, **mode}) as engine:
        for arrivals in (12, 1):
            outputs = run_all(engine, prompts, params, arrivals=arrivals)
            got = [[output.token_ids[0] for output in of_prompt] for of_prompt in outputs]
            assert got == [expected(p, length) for p, length in zip(prompts, lengths, strict=True)]
            engine.check()


@pytest.mark.parametrize("rows", [1, 2, 4, 8, 16])
def test_bits_in_bfloat16_with_graphs_and_overlap_on_and_off(tiny_model: TinyCheckpoint, rows: int) -> None:
    """Tokens and log-probabilities are the same bits with overlap on and off, with graphs and without.

    Between graphs and none the bits are compared in deterministic mode alone: a graph fills its step up to a captured
    size, for which cuBLAS may choose another kernel.
    """
    prompts = prompts_of(rows, seed=rows)

    def outputs(settings: dict[str, Any]) -> dict[str, Any]:
        with run_on_gpu(tiny_model.path, dtype="bfloat16", cache="naive", **settings) as engine:
            kinds = {
                "greedy": SamplingParams(temperature=0, max_tokens=40, ignore_eos=True),
                "seeded": SamplingParams(temperature=0.8, seed=7, max_tokens=40, ignore_eos=True),
                "log-probabilities": SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=20),
            }
            runs = {kind: run_all(engine, prompts, [params] * rows) for kind, params in kinds.items()}
        return {
            kind: [[(o.token_ids, o.logprobs) for o in of_prompt] for of_prompt in run] for kind, run in runs.items()
        }

    assert outputs(MODES["graphs, overlap"]) == outputs(MODES["graphs"])
    assert outputs(MODES["overlap"]) == outputs(MODES["neither"])
    exact = {"deterministic": True}
    assert outputs(MODES["graphs, overlap"] | exact) == outputs(MODES["neither"] | exact)
