"""What the GPU tests share: engines with graphs on and off, overlap on and off, and a tiny model with its answers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from mini_sglang import Engine
from tests.tiny import Checkpoints, TinyCheckpoint, greedy_ids, run_engine

# No tests of graph sizes: five graphs are captured sooner than thirty-five.
SMALL = {"device": "cuda", "max_running_requests": 16}
MODES: dict[str, dict[str, Any]] = {  # by name; the first is what a GPU gets by default
    "graphs, overlap": {"run_ahead": 1},
    "graphs": {"run_ahead": 0},
    "overlap": {"run_ahead": 1, "cuda_graph_max_bs": 0},
    "neither": {"run_ahead": 0, "cuda_graph_max_bs": 0},
}


Expected = Callable[[list[int], int], list[int]]


def run_on_gpu(model: Path, **settings: object) -> AbstractContextManager[Engine]:
    """`run_engine`, on a GPU, of up to 16 requests."""
    return run_engine(model, **{**SMALL, **settings})


@pytest.fixture(params=list(MODES))
def mode(request: pytest.FixtureRequest) -> dict[str, Any]:
    return MODES[request.param]


@pytest.fixture(scope="session")
def tiny_model(checkpoints: Checkpoints) -> TinyCheckpoint:
    """A checkpoint whose heads are as long as those of real models."""
    return checkpoints.write("qwen3", head_dim=64, num_attention_heads=8, num_key_value_heads=2)


@pytest.fixture(scope="session")
def expected(tiny_model: TinyCheckpoint) -> Expected:
    """`expected(prompt, num_tokens)`: transformers' answer by `tiny_model`, on the CPU, each prompt computed once."""

    @functools.cache
    def answer(prompt: tuple[int, ...], num_tokens: int) -> list[int]:
        ids: list[int] = greedy_ids(tiny_model.model, list(prompt), num_tokens)
        return ids

    return lambda prompt, num_tokens: answer(tuple(prompt), num_tokens)
