"""The contract: greedy output equals transformers token for token (float32, CPU), however the work is cut up.

Every architecture, from safetensors and GGUF, alone and in a batch with ragged arrivals, with any chunk and page size,
with prefix hits, with run-ahead, and when the pool is so small that requests are preempted.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mini_sglang.outputs import FinishReason
from mini_sglang.sampling_params import SamplingParams
from mini_sglang.weights.hub import ModelSource
from tests.tiny import Checkpoints, TinyCheckpoint, generate_ids, greedy_ids, make_ragged_prompts, run_engine

REFERENCE = json.loads((Path(__file__).parent / "data" / "smollm2_reference.json").read_text())
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
CHECKPOINTS: dict[str, tuple[Callable[..., TinyCheckpoint], dict[str, Any]]] = {
    "llama": (Checkpoints.write, {"family": "llama"}),
    "llama, llama3 rope, tied": (
        Checkpoints.write,
        {"family": "llama", "rope": "llama3", "tie_word_embeddings": True},
    ),
    "llama, linear rope": (Checkpoints.write, {"family": "llama", "rope": "linear"}),
    "llama, yarn rope, biases": (
        Checkpoints.write,
        {"family": "llama", "rope": "yarn", "attention_bias": True, "mlp_bias": True},
    ),
    "gpt_oss, window, yarn rope": (
        Checkpoints.write,
        {
            "family": "gpt_oss",
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "num_hidden_layers": 3,
            "sliding_window": 24,
            "rope": "yarn, not truncated",
        },
    ),
    "llama gguf": (Checkpoints.write_gguf, {"family": "llama"}),
    "llama gguf Q4_1": (Checkpoints.write_gguf, {"family": "llama", "kind": "Q4_1"}),
    "qwen2": (Checkpoints.write, {"family": "qwen2", "sharded": True}),
    "qwen2 gguf": (Checkpoints.write_gguf, {"family": "qwen2"}),
    "qwen3": (Checkpoints.write, {"family": "qwen3"}),
    "qwen3, wide heads, tied": (
        Checkpoints.write,
        {"family": "qwen3", "head_dim": 32, "num_key_value_heads": 1, "tie_word_embeddings": True},
    ),
    "mistral, window of 24, wide heads": (
        Checkpoints.write,
        {"family": "mistral", "head_dim": 32, "sliding_window": 24},
    ),
    "qwen3_moe, a dense layer, normalised": (
        Checkpoints.write,
        {
            "family": "qwen3_moe",
            "num_hidden_layers": 3,
            "mlp_only_layers": [1],
            "norm_topk_prob": True,
            "sharded": True,
            **EXPERTS,
        },
    ),
    "qwen3_moe, every second layer dense, fused, window": (
        Checkpoints.write,
        {
            "family": "qwen3_moe",
            "decoder_sparse_step": 2,
            "norm_topk_prob": False,
            "use_sliding_window": True,
            "sliding_window": 24,
            "fused": True,
            **EXPERTS,
        },
    ),
    "mixtral": (Checkpoints.write, {"family": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}),
    "mixtral, fused, window of 24": (
        Checkpoints.write,
        {"family": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 3, "sliding_window": 24, "fused": True},
    ),
    "smollm3, tied": (Checkpoints.write, {"family": "smollm3", "num_hidden_layers": 4, "tie_word_embeddings": True}),
    "smollm3, listed layers, yarn rope, biases": (
        Checkpoints.write,
        {"family": "smollm3", "no_rope_layers": [0, 1, 0], "rope": "yarn", "attention_bias": True, "mlp_bias": True},
    ),
    "smollm3 gguf": (Checkpoints.write_gguf, {"family": "smollm3", "num_hidden_layers": 5}),
    "olmo2": (Checkpoints.write, {"family": "olmo2"}),
    "olmo2, wide heads, biases, tied": (
        Checkpoints.write,
        {"family": "olmo2", "head_dim": 32, "attention_bias": True, "tie_word_embeddings": True},
    ),
    "olmo2 gguf Q4_1": (Checkpoints.write_gguf, {"family": "olmo2", "kind": "Q4_1"}),
    "mistral gguf": (Checkpoints.write_gguf, {"family": "mistral", "head_dim": 32, "sliding_window": None}),
    "qwen3_moe gguf Q4_1": (
        Checkpoints.write_gguf,
        {"family": "qwen3_moe", "kind": "Q4_1", "norm_topk_prob": True, **EXPERTS},
    ),
    "mixtral gguf Q8_0": (
        Checkpoints.write_gguf,
        {"family": "mixtral", "kind": "Q8_0", "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
}


@pytest.fixture(params=list(CHECKPOINTS))
def checkpoint(request: pytest.FixtureRequest, checkpoints: Checkpoints) -> TinyCheckpoint:
    write, arguments = CHECKPOINTS[request.param]
    return write(checkpoints, **arguments)


def test_every_architecture_however_the_work_is_cut_up(checkpoint: TinyCheckpoint) -> None:
    prompts = make_ragged_prompts(16, 320)
    expected = [greedy_ids(checkpoint.model, prompt) for prompt in prompts]

    def check(name: str, arrivals: int = 1000, optimistic: bool = False, **settings: Any) -> Any:
        with run_engine(checkpoint.path, **settings) as engine:
            if optimistic:  # the scheduler then admits more than the pool can hold
                engine.scheduler.expected_output = 0.0
            got = generate_ids(engine, prompts, arrivals=arrivals)
            wrong = [index for index in range(len(prompts)) if got[index] != expected[index]]
            assert not wrong, f"{name}: requests {wrong} differ from transformers"
        return engine

    check("alone", max_running_requests=1, cache="naive")
    check("batch of 16, ragged arrivals", arrivals=1)
    for chunk in (1, 7, 64):
        check(f"chunks of {chunk}", arrivals=3, max_prefill_tokens=max(chunk, 1), max_running_requests=16)
    for page_size in (1, 3, 16):
        with run_engine(checkpoint.path, page_size=page_size) as engine:
            assert generate_ids(engine, prompts, arrivals=2) == expected, f"pages of {page_size}"
            before = engine.stats()
            assert generate_ids(engine, prompts) == expected, f"pages of {page_size}, everything cached"
            after = engine.stats()
            reused = after.num_cached_tokens - before.num_cached_tokens
            assert reused == sum(len(prompt) - 1 for prompt in prompts), "all but the last token of each prompt"
    preempted = check("a pool of 160 tokens", optimistic=True, num_pages=40, page_size=4)
    assert preempted.stats().num_preemptions > 0
    ahead = check("run-ahead 1, small pool", optimistic=True, run_ahead=1, num_pages=40, page_size=4)
    assert ahead.stats().num_preemptions > 0
    check("run-ahead 2, chunks of 7", run_ahead=2, max_prefill_tokens=7, arrivals=2)
    check("longest prefix first", schedule="lpm", max_running_requests=4)


@pytest.mark.parametrize("name", ["gpt_oss, window, yarn rope", "qwen3_moe, a dense layer, normalised", "mixtral"])
def test_mixtures_with_any_number_of_rows_in_a_step(name: str, checkpoints: Checkpoints) -> None:
    write, arguments = CHECKPOINTS[name]
    checkpoint = write(checkpoints, **arguments)
    rng = random.Random(0)
    prompts = [[rng.randrange(3, 320) for _ in range(rng.randint(1, 6))] for _ in range(64)]
    expected = [greedy_ids(checkpoint.model, prompt, 5) for prompt in prompts]
    with run_engine(checkpoint.path, cache="naive") as engine:
        for rows in (1, 2, 17, 64):
            steps = engine.stats().num_steps
            assert generate_ids(engine, prompts[:rows], num_tokens=5) == expected[:rows]
            assert engine.stats().num_steps - steps == 5, "all rows in every step"


def test_end_tokens_stop_as_in_transformers(checkpoints: Checkpoints) -> None:
    checkpoint = checkpoints.write("llama")
    rng = random.Random(1)
    with run_engine(checkpoint.path, max_running_requests=8) as engine:
        prompts = [[rng.randrange(3, 320) for _ in range(10)] for _ in range(30)]
        for index, prompt in enumerate(prompts):
            engine.add_request(str(index), prompt, SamplingParams(temperature=0, max_tokens=60))
        outputs: dict[str, list[int]] = {str(index): [] for index in range(len(prompts))}
        reasons: dict[str, FinishReason | None] = {}
        while engine.has_work:
            for output in engine.step():
                outputs[output.request_id] += output.token_ids
                reasons[output.request_id] = output.finish_reason
    ended = 0
    for index, prompt in enumerate(prompts):
        expected = greedy_ids(checkpoint.model, prompt, 60)
        end = next((i for i, token in enumerate(expected) if token in (0, 2)), None)
        assert outputs[str(index)] == (expected if end is None else expected[: end + 1])
        assert reasons[str(index)] == (FinishReason.LENGTH if end is None else FinishReason.STOP)
        ended += end is not None
    assert ended, "the test wants prompts that end by themselves"


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_prefill_tokens": 3, "page_size": 3},
        {"num_pages": 20, "page_size": 4, "run_ahead": 1},
    ],
    ids=["as served", "chunks of 3, pages of 3", "80 tokens of pool, run-ahead"],
)
def test_the_built_in_model(builtin_model: ModelSource, settings: dict[str, Any]) -> None:
    cases = REFERENCE["cases"]
    with run_engine(builtin_model.path, **settings) as engine:
        for case in cases:
            assert generate_ids(engine, [case["prompt_ids"]]) == [case["output_ids_ignore_eos"]], case["name"]
        together = generate_ids(engine, [case["prompt_ids"] for case in cases])
        assert together == [case["output_ids_ignore_eos"] for case in cases]
