"""Rotary frequencies are those of transformers: for the published Llama 3 releases, and for settings of every kind."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from mini_sglang.layers.rotary import inverse_frequencies
from mini_sglang.weights.hf_config import config_from_hf

LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
RELEASES: dict[str, dict[str, Any]] = {
    "3.1 and 3.3": {**LLAMA3, "factor": 8.0, "original_max_position_embeddings": 8192},
    "3.2": {**LLAMA3, "factor": 32.0, "original_max_position_embeddings": 8192},
}


def assert_equal_frequencies(rope: dict[str, Any], *, head_dim: int, theta: float, length: int) -> None:
    theirs = LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=length,
        rope_parameters={"rope_theta": theta, **rope},
    )
    ours = config_from_hf(theirs.to_dict())
    inverse, amplitude = inverse_frequencies(ours)
    wanted, wanted_amplitude = ROPE_INIT_FUNCTIONS[rope["rope_type"]](theirs, torch.device("cpu"))
    torch.testing.assert_close(inverse, wanted, rtol=1e-5, atol=0)
    assert amplitude == pytest.approx(wanted_amplitude)


@pytest.mark.parametrize("release", list(RELEASES))
@pytest.mark.parametrize("head_dim", [64, 128])
def test_llama_releases(release: str, head_dim: int) -> None:
    assert_equal_frequencies(RELEASES[release], head_dim=head_dim, theta=500000.0, length=131072)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn"])
def test_settings_of_every_kind(kind: str, seed: int) -> None:
    rng = random.Random(seed)
    original = rng.choice([64, 2048, 8192, 32768])
    rope: dict[str, Any] = {"rope_type": kind, "factor": rng.choice([1.0, 1.5, 4.0, 40.0])}
    if kind == "llama3":
        rope |= {"low_freq_factor": rng.choice([0.5, 1.0, 2.0]), "high_freq_factor": rng.choice([3.0, 4.0, 8.0])}
    if kind == "yarn":
        extras = {"beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 1.2, "mscale": 0.7, "mscale_all_dim": 1.1}
        rope |= {name: value for name, value in extras.items() if rng.random() < 0.5}
    if kind != "linear":
        rope["original_max_position_embeddings"] = original
    length = original * rng.choice([1, 4, 16])
    assert_equal_frequencies(rope, head_dim=rng.choice([16, 64, 96, 128]), theta=rng.choice([1e4, 5e5]), length=length)
