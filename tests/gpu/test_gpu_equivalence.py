"""The contract on a GPU: float32 greedy output equals transformers on the CPU token for token.

However the work is cut up, with graphs on and off, overlap on and off: so these are identical among themselves too.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.conftest import run_on_gpu
from tests.tiny import Checkpoints, TinyCheckpoint, generate_ids, greedy_ids, make_ragged_prompts

pytestmark = pytest.mark.gpu

Write = Callable[..., TinyCheckpoint]
Case = tuple[Path, list[list[int]], list[list[int]]]  # a checkpoint, prompts, and what transformers continues them with

CHECKPOINTS: dict[str, tuple[Write, dict[str, Any]]] = {
    "llama": (Checkpoints.write, {"family": "llama"}),
    "qwen2": (Checkpoints.write, {"family": "qwen2"}),
    "qwen3": (Checkpoints.write, {"family": "qwen3"}),
    "qwen3_moe, a dense layer": (
        Checkpoints.write,
        {
            "family": "qwen3_moe",
            "num_hidden_layers": 3,
            "mlp_only_layers": [1],
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
        },
    ),
}
OTHERS: dict[str, tuple[Write, dict[str, Any]]] = {
    "llama, llama3 rope, tied": (
        Checkpoints.write,
        {"family": "llama", "rope": "llama3", "tie_word_embeddings": True},
    ),
    "llama, yarn rope, biases, heads of 96": (
        Checkpoints.write,
        {"family": "llama", "rope": "yarn", "attention_bias": True, "mlp_bias": True, "head_dim": 96},
    ),
    "llama gguf Q4_1": (Checkpoints.write_gguf, {"family": "llama", "kind": "Q4_1"}),
    "qwen3, one KV head of 128": (
        Checkpoints.write,
        {"family": "qwen3", "head_dim": 128, "num_attention_heads": 8, "num_key_value_heads": 1},
    ),
    "smollm3, yarn rope, tied": (
        Checkpoints.write,
        {"family": "smollm3", "num_hidden_layers": 4, "rope": "yarn", "tie_word_embeddings": True},
    ),
    "olmo2": (Checkpoints.write, {"family": "olmo2"}),
    "mistral, window of 24": (Checkpoints.write, {"family": "mistral", "sliding_window": 24}),
    "gpt_oss, window of 24": (
        Checkpoints.write,
        {"family": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 24},
    ),
    "mixtral, window of 24": (
        Checkpoints.write,
        {"family": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 3, "sliding_window": 24},
    ),
}
CUTS: dict[str, dict[str, Any]] = {
    "alone": {"max_running_requests": 1, "cache": "naive"},
    "batch of 16, ragged arrivals": {"arrivals": 1},
    "chunks of 7, pages of 3": {"arrivals": 3, "max_prefill_tokens": 7, "page_size": 3},
    "a pool of 160 tokens": {"num_pages": 40, "page_size": 4},
}


def make_case(checkpoint: TinyCheckpoint) -> Case:
    prompts = make_ragged_prompts(16, 320)
    return checkpoint.path, prompts, [greedy_ids(checkpoint.model, prompt) for prompt in prompts]


@pytest.fixture(scope="module", params=list(CHECKPOINTS))
def case(request: pytest.FixtureRequest, checkpoints: Checkpoints) -> Case:
    write, arguments = CHECKPOINTS[request.param]
    return make_case(write(checkpoints, **arguments))


def check_cuts(case: Case, settings: dict[str, Any]) -> None:
    """Every way of cutting up the work, everything twice: the second time all prompts are cached."""
    path, prompts, expected = case
    for name, cut in CUTS.items():
        cut = dict(cut)
        arrivals = cut.pop("arrivals", 1000)
        with run_on_gpu(path, **{**settings, **cut}) as engine:
            if "num_pages" in cut:  # an optimist admits more than the pool can hold
                engine.scheduler.expected_output = 0.0
            for turn in ("first", "second"):
                got = generate_ids(engine, prompts, arrivals=arrivals)
                wrong = [index for index in range(len(prompts)) if got[index] != expected[index]]
                assert not wrong, f"{name}, {turn} time: requests {wrong} differ from transformers"
            if "num_pages" in cut:
                assert engine.stats().num_preemptions > 0
            elif cut.get("cache") != "naive":
                assert engine.stats().num_cached_tokens >= sum(len(prompt) - 1 for prompt in prompts)


def test_greedy_output_equals_transformers(case: Case, mode: dict[str, Any]) -> None:
    check_cuts(case, mode)


@pytest.mark.parametrize("name", list(OTHERS))
def test_other_shapes_equal_transformers(checkpoints: Checkpoints, name: str) -> None:
    write, arguments = OTHERS[name]
    check_cuts(make_case(write(checkpoints, **arguments)), {})
