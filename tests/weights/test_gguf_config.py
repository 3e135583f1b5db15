"""Folders and GGUF files of the same model give the same ModelConfig."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mini_sglang.model_config import ModelConfig, RopeScaling
from mini_sglang.weights.gguf_config import llama3_divisors, llama3_scaling
from mini_sglang.weights.hf_config import end_token_ids
from mini_sglang.weights.hub import ModelSource
from mini_sglang.weights.model_config import load_model_config
from tests.tiny import Checkpoints


def test_builtin_model(builtin_model: ModelSource) -> None:
    assert load_model_config(builtin_model) == ModelConfig(
        architecture="llama",
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        context_length=8192,
        rms_norm_eps=1e-5,
        rope_theta=100000.0,
        tie_word_embeddings=True,
        eos_token_ids=frozenset({0, 2}),  # <|im_end|>, and <|endoftext|>, which ends a document
    )


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["llama", "olmo2", "qwen2", "smollm3"])
def test_gguf_and_safetensors_of_one_model_agree(checkpoints: Checkpoints, family: str, tied: bool) -> None:
    changes: dict[str, Any] = {"tie_word_embeddings": tied, "num_hidden_layers": 5}
    folder = load_model_config(checkpoints.write(family, **changes).source)
    assert load_model_config(checkpoints.write_gguf(family, **changes).source) == folder
    assert folder.eos_token_ids == {0, 2}
    assert folder.tie_word_embeddings == tied


@pytest.mark.parametrize("rope", ["linear", "llama3", "yarn"])
def test_rope_scaling_survives_the_gguf_format(checkpoints: Checkpoints, rope: str) -> None:
    # Wide heads, so that the Llama 3.1 scaling has frequencies on both sides and between its bounds.
    folder = load_model_config(checkpoints.write("llama", rope=rope, head_dim=32).source)
    from_gguf = load_model_config(checkpoints.write_gguf("llama", rope=rope, head_dim=32).source)
    assert folder.rope_scaling is not None
    assert folder.rope_scaling.kind == rope
    assert from_gguf == folder


def test_llama_biases_are_seen_in_a_gguf(checkpoints: Checkpoints) -> None:
    config = load_model_config(checkpoints.write_gguf("llama", attention_bias=True, mlp_bias=True).source)
    assert (config.attention_bias, config.attention_output_bias, config.mlp_bias) == (True, True, True)


def test_end_tokens_of_all_files_count(tmp_path: Path) -> None:
    files = {
        "config.json": {"eos_token_id": 5},
        "generation_config.json": {"eos_token_id": [6, 7]},
        "tokenizer_config.json": {"eos_token": {"content": "<end>"}},
        "tokenizer.json": {"added_tokens": [{"id": 8, "content": "<end>"}, {"id": 9, "content": "<other>"}]},
    }
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert end_token_ids(tmp_path) == {5, 6, 7, 8}


def test_malformed_config_is_named(tmp_path: Path) -> None:
    source = ModelSource("mine", tmp_path, "safetensors")
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        load_model_config(source)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"model 'mine'.*config\.json is not valid JSON"):
        load_model_config(source)
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    with pytest.raises(ValueError, match=r"model 'mine'.*'mamba'"):
        load_model_config(source)


def test_llama3_factors_of_the_released_models_are_recognised() -> None:
    for factor, head_dim in ((8.0, 128), (32.0, 64)):  # Llama 3.1 8B, Llama 3.2 1B
        scaling = RopeScaling(kind="llama3", factor=factor, original_context_length=8192)
        divisors = llama3_divisors(scaling, 500000.0, head_dim).astype("float32")
        assert llama3_scaling(divisors, 500000.0, head_dim) == scaling
        divisors[3] *= 1.5
        with pytest.raises(ValueError, match="rope_freqs"):
            llama3_scaling(divisors, 500000.0, head_dim)


@pytest.mark.parametrize(
    ("family", "config"),
    [
        (
            "qwen3_moe",
            {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True},
        ),
        ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 3}),
    ],
)
def test_gguf_and_safetensors_of_one_mixture_agree(
    checkpoints: Checkpoints, family: str, config: dict[str, Any]
) -> None:
    folder = load_model_config(checkpoints.write(family, **config).source)
    assert load_model_config(checkpoints.write_gguf(family, **config).source) == folder


def test_llama_cpp_takes_mistral_for_llama(checkpoints: Checkpoints) -> None:
    """So a GGUF file says nothing about a window."""
    config = load_model_config(checkpoints.write_gguf("mistral", sliding_window=24).source)
    assert (config.architecture, config.sliding_window) == ("llama", None)
