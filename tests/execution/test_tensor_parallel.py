"""Equal answers: a model that several ranks share says what it says alone, which is what transformers says.

The workers are threads here, which start at once: what they run is what a worker's process runs. Processes are the
matter of test_worker_group.py.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from mini_sglang.models.architectures import ARCHITECTURES
from mini_sglang.sampling_params import SamplingParams
from tests.tiny import Checkpoints, generate_ids, greedy_ids, make_ragged_prompts, run_all, run_engine

pytestmark = pytest.mark.usefixtures("thread_workers")

ODD: dict[str, Any] = {
    "hidden_size": 72,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 52,
    "vocab_size": 323,
}
EXPERTS: dict[str, Any] = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
CHECKPOINTS: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama"},
    "llama, odd sizes, biases": {"family": "llama", "attention_bias": True, "mlp_bias": True, **ODD},
    "llama, odd sizes, tied": {"family": "llama", "tie_word_embeddings": True, "rope": "llama3", **ODD},
    "gpt_oss": {"family": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 24, **ODD},
    "llama, one KV head for five": {
        "family": "llama",
        "hidden_size": 80,
        "num_attention_heads": 5,
        "num_key_value_heads": 1,
    },
    "mistral, window of 24": {"family": "mistral", "head_dim": 32, "sliding_window": 24, **ODD},
    "olmo2, odd sizes, biases": {"family": "olmo2", "attention_bias": True, **ODD},
    "olmo2, one KV head for five": {
        "family": "olmo2",
        "hidden_size": 80,
        "num_attention_heads": 5,
        "num_key_value_heads": 1,
    },
    "qwen2": {"family": "qwen2", **ODD},
    "qwen3": {"family": "qwen3", "tie_word_embeddings": True, **ODD},
    "qwen3_moe, a dense layer": {
        "family": "qwen3_moe",
        "num_hidden_layers": 3,
        "mlp_only_layers": [1],
        "norm_topk_prob": True,
        **EXPERTS,
        **ODD,
    },
    "mixtral, fused": {"family": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 3, "fused": True, **ODD},
    "smollm3, tied": {"family": "smollm3", "num_hidden_layers": 4, "tie_word_embeddings": True, **ODD},
}
GGUF_FEATURES: dict[str, dict[str, Any]] = {
    "llama": {"rope": "llama3", "tie_word_embeddings": True},
    "mistral": {"head_dim": 32, "sliding_window": None},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "olmo2": {},
    "qwen2": {},
    "qwen3": {"head_dim": 32, "num_hidden_layers": 3},
    "qwen3_moe": {"norm_topk_prob": True, **EXPERTS},
    "smollm3": {"num_hidden_layers": 4},
}


def test_no_family_is_forgotten_below() -> None:
    assert {config["family"] for config in CHECKPOINTS.values()} == set(ARCHITECTURES)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_every_family_at_two_and_three_ranks(name: str, checkpoints: Checkpoints) -> None:
    checkpoint = checkpoints.write(**CHECKPOINTS[name])
    prompts = make_ragged_prompts(6, 320)
    expected = [greedy_ids(checkpoint.model, prompt, 12) for prompt in prompts]
    for tp in (2, 3):
        with run_engine(checkpoint.path, tp=tp, max_prefill_tokens=40) as engine:
            assert generate_ids(engine, prompts, arrivals=2, num_tokens=12) == expected, f"tp {tp}"


@pytest.mark.parametrize("family", GGUF_FEATURES)
def test_every_family_from_gguf(family: str, checkpoints: Checkpoints) -> None:
    checkpoint = checkpoints.write_gguf(family, **{**ODD, **GGUF_FEATURES[family]})
    prompts = make_ragged_prompts(3, 320)
    expected = [greedy_ids(checkpoint.model, prompt, 8) for prompt in prompts]
    for tp in (1, 2, 3):
        with run_engine(checkpoint.path, tp=tp) as engine:
            assert generate_ids(engine, prompts, num_tokens=8) == expected, f"tp {tp}"


@pytest.mark.parametrize("name", ["qwen3_moe, a dense layer", "mixtral, fused"])
def test_mixtures_with_any_number_of_rows_in_a_step(name: str, checkpoints: Checkpoints) -> None:
    checkpoint = checkpoints.write(**CHECKPOINTS[name])
    rng = random.Random(0)
    prompts = [[rng.randrange(3, 320) for _ in range(rng.randint(1, 3))] for _ in range(64)]
    expected = [greedy_ids(checkpoint.model, prompt, 3) for prompt in prompts]
    for tp in (2, 3):
        with run_engine(checkpoint.path, tp=tp, cache="naive") as engine:
            for rows in (1, 2, 17, 64):
                steps = engine.stats().num_steps
                assert generate_ids(engine, prompts[:rows], num_tokens=3) == expected[:rows], f"tp {tp}, {rows} rows"
                assert engine.stats().num_steps - steps == 3, "all rows in every step"


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_from_gguf_whatever_else_happens(backend: str, checkpoints: Checkpoints) -> None:
    checkpoint = checkpoints.write_gguf(
        "llama", kind="Q4_1", hidden_size=96, num_attention_heads=6, num_key_value_heads=3, intermediate_size=160
    )
    prompts = make_ragged_prompts(12, 320)
    expected = [greedy_ids(checkpoint.model, prompt) for prompt in prompts]
    with run_engine(checkpoint.path, tp=2, attention_backend=backend, num_pages=40, page_size=4, run_ahead=1) as engine:
        engine.scheduler.expected_output = 0.0  # admits more than the pool can hold
        assert generate_ids(engine, prompts, arrivals=3) == expected
        assert engine.stats().num_preemptions > 0
        assert generate_ids(engine, prompts[:1]) == expected[:1]
        assert engine.stats().num_cached_tokens > 0


def test_seeds_penalties_and_log_probabilities_are_the_same(checkpoints: Checkpoints) -> None:
    checkpoint = checkpoints.write("llama", **ODD)
    prompts = make_ragged_prompts(4, 320)
    params = [
        SamplingParams(seed=seed, max_tokens=12, temperature=0.9, repetition_penalty=1.2, logprobs=2, ignore_eos=True)
        for seed in range(len(prompts))
    ]
    tokens, logprobs = [], []
    for tp in (1, 2):
        with run_engine(checkpoint.path, tp=tp) as engine:
            outputs = run_all(engine, prompts, params)
        tokens.append([[token for part in one for token in part.token_ids] for one in outputs])
        logprobs.append(
            [value for one in outputs for part in one for entry in part.logprobs or [] for value in entry.logprobs]
        )
    assert tokens[0] == tokens[1]
    assert logprobs[1] == pytest.approx(logprobs[0], abs=1e-4)


def test_random_weights_are_the_same_model(checkpoints: Checkpoints) -> None:
    path = checkpoints.write("qwen3", **ODD).path
    answers = []
    for tp in (1, 2):
        with run_engine(path, tp=tp, load_format="dummy") as engine:
            answers.append(generate_ids(engine, [[5, 6, 7], [8]]))
    assert answers[0] == answers[1]
