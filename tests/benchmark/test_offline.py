"""The offline workload is the published one, its floor is arithmetic, and a run returns every token asked for."""

from __future__ import annotations

from typing import Any

import pytest

from mini_sglang.benchmark.offline import Workload, floor_seconds, run
from mini_sglang.config import EngineConfig
from mini_sglang.engine import Engine
from mini_sglang.models.config import ModelConfig


def test_the_workload_is_the_published_one() -> None:
    workload = Workload.random(256)
    assert sum(len(prompt) for prompt in workload.prompts) == 142_827
    assert workload.num_output_tokens == 133_966


def test_the_floor_of_the_8b_shape() -> None:
    shape = ModelConfig(
        architecture="qwen3",
        vocab_size=151_936,
        hidden_size=4096,
        intermediate_size=12_288,
        num_layers=36,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        context_length=40_960,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
    )
    seconds = floor_seconds(shape, Workload.random(256), bytes_per_second=3.0e12, flops=770e12)
    assert seconds == pytest.approx(13.73, abs=0.1)  # KV read 5.94, weights 5.17, prompts 2.61


def test_a_run_returns_every_token(write_checkpoint: Any) -> None:
    engine = Engine(EngineConfig(model=str(write_checkpoint().path), dtype="float32", num_threads=1, num_pages=64))
    workload = Workload([[3, 4, 5], [6] * 40], [7, 12])
    result = run(engine, workload)
    assert result.steps >= 12
    assert result.tokens_per_second > 0
    engine.close()
