"""config.json in all its spellings becomes one ModelConfig; what is not supported is refused by name."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
from transformers import AutoConfig, Qwen3Config, SmolLM3Config

from mini_sglang.model_config import ExpertsConfig, ModelConfig, RopeScaling
from mini_sglang.models.architectures import ARCHITECTURES
from mini_sglang.weights.hf_config import config_from_hf

# As published with Llama-3.1-8B-Instruct, shortened.
LLAMA_3_1: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
# As published with Qwen2.5-7B-Instruct.
QWEN_2_5: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "model_type": "qwen2",
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 152064,
}
# As published with Qwen3-30B-A3B, shortened.
QWEN_3_MOE: dict[str, Any] = {
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
LLAMA3_SCALING = RopeScaling(kind="llama3", factor=8.0, original_context_length=8192)


def yarn(**settings: Any) -> dict[str, Any]:
    return {"rope_scaling": {"type": "yarn", "factor": 2.0, **settings}}


def without(config: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in keys}


def test_llama_3_1() -> None:
    assert config_from_hf(LLAMA_3_1) == ModelConfig(
        architecture="llama",
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        context_length=131072,
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
        rope_scaling=LLAMA3_SCALING,
        eos_token_ids=frozenset({128001, 128008, 128009}),
    )


def test_qwen_2_5_has_biases_on_q_k_and_v_alone() -> None:
    config = config_from_hf(QWEN_2_5)
    assert (config.attention_bias, config.attention_output_bias, config.mlp_bias) == (True, False, False)


def test_llama_attention_bias_includes_the_output_projection() -> None:
    config = config_from_hf({**LLAMA_3_1, "attention_bias": True, "mlp_bias": True})
    assert (config.attention_bias, config.attention_output_bias, config.mlp_bias) == (True, True, True)


@pytest.mark.parametrize("family", list(ARCHITECTURES))
def test_what_transformers_writes_is_read_as_transformers_means_it(family: str) -> None:
    theirs = AutoConfig.for_model(
        family, num_attention_heads=8, num_key_value_heads=2, hidden_size=512, vocab_size=1000
    )
    ours = config_from_hf(theirs.to_dict())
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or 512 // 8)
    assert (ours.num_heads, ours.num_kv_heads) == (8, 2)
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.context_length == theirs.max_position_embeddings
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert ours.sliding_window == getattr(theirs, "sliding_window", None)


@pytest.mark.parametrize("family", list(ARCHITECTURES))
def test_what_a_config_leaves_out_is_what_transformers_takes(family: str) -> None:
    """All but num_key_value_heads, which every published config of these families gives."""
    sizes = {"num_attention_heads": 8, "num_hidden_layers": 5, "hidden_size": 512, "intermediate_size": 64}
    short = {"model_type": family, "vocab_size": 99, **sizes, "num_key_value_heads": 4}
    written = AutoConfig.for_model(**short).to_dict()
    assert config_from_hf({**written, "eos_token_id": None}) == config_from_hf(short)


@pytest.mark.parametrize(
    "settings",
    [{}, {"no_rope_layer_interval": 3}, {"no_rope_layers": [0, 1, 1, 0, 1, 1, 0, 0]}, {"no_rope_layers": [1] * 6}],
)
def test_smollm3_layers_without_rotation(settings: dict[str, Any]) -> None:
    theirs = SmolLM3Config(num_hidden_layers=6, **settings)
    wanted = {layer for layer, rotates in enumerate(theirs.no_rope_layers[:6]) if not rotates}
    assert config_from_hf(theirs.to_dict()).unrotated_layers == wanted
    assert config_from_hf({**without(theirs.to_dict(), "no_rope_layers"), **settings}).unrotated_layers == wanted


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"no_rope_layers": [1, 0]}, "no_rope_layers must list each of the 36 layers, got [1, 0]"),
        ({"no_rope_layers": None, "no_rope_layer_interval": 0}, "'no_rope_layer_interval' must be an integer"),
        ({"use_sliding_window": True, "sliding_window": 512}, "sliding_window 512"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
    ],
)
def test_a_smollm3_that_is_not_supported_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        config_from_hf({**without(SmolLM3Config().to_dict(), "layer_types"), **changes})


def test_qwen3_moe() -> None:
    config = config_from_hf(QWEN_3_MOE)
    assert config.experts == ExpertsConfig(
        num_experts=128, experts_per_token=8, intermediate_size=768, normalize_weights=True
    )
    assert config.sliding_window is None
    renamed = {**without(QWEN_3_MOE, "num_experts"), "num_local_experts": 128}  # as transformers 5 writes it
    assert config_from_hf(renamed) == config


def test_layers_are_dense_by_step_or_by_name() -> None:
    changes = {"num_hidden_layers": 6, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    experts = config_from_hf({**QWEN_3_MOE, **changes}).experts
    assert experts is not None
    assert experts.dense_layers == {0, 2, 3, 4}


def test_a_window_counts_where_the_family_has_one() -> None:
    mistral = {**LLAMA_3_1, "rope_scaling": None, "model_type": "mistral"}
    assert config_from_hf({**mistral, "sliding_window": 24}).sliding_window == 24
    assert config_from_hf({**mistral, "sliding_window": None}).sliding_window is None
    qwen = {**QWEN_3_MOE, "sliding_window": 24}
    assert config_from_hf(qwen).sliding_window is None
    assert config_from_hf({**qwen, "use_sliding_window": True}).sliding_window == 24


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts": 4}, "experts_per_token (8) exceeds num_experts (4)"),
        ({"moe_intermediate_size": 0}, "'moe_intermediate_size' must be an integer of at least 1, got 0"),
        ({"use_sliding_window": True, "sliding_window": -1}, "'sliding_window' must be an integer of at least 1"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"mlp_only_layers": 3}, "'mlp_only_layers' must be a list, got 3"),
        ({"mlp_only_layers": [[3]]}, "'mlp_only_layers' must hold integers, got [3]"),
    ],
)
def test_a_mixture_that_does_not_fit_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        config_from_hf({**QWEN_3_MOE, **changes})


def test_qwen3_without_head_dim_takes_its_familys_128() -> None:
    config = {**without(QWEN_2_5, "num_attention_heads"), "model_type": "qwen3", "num_attention_heads": 16}
    assert config_from_hf(config).head_dim == Qwen3Config(hidden_size=3584, num_attention_heads=16).head_dim == 128


def test_missing_kv_heads_mean_one_per_query_head() -> None:
    assert config_from_hf(without(LLAMA_3_1, "num_key_value_heads")).num_kv_heads == 32


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        ({"rope_type": "default"}, None),
        ({"type": "linear", "factor": 2}, RopeScaling(kind="linear", factor=2.0)),
        (LLAMA_3_1["rope_scaling"], LLAMA3_SCALING),
        (
            {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
            RopeScaling(kind="yarn", factor=4.0, original_context_length=32768),
        ),
        (
            {"rope_type": "yarn", "factor": 4.0, "beta_fast": 16, "beta_slow": 2, "attention_factor": 1.5},
            RopeScaling(
                kind="yarn",
                factor=4.0,
                original_context_length=131072,
                beta_fast=16.0,
                beta_slow=2.0,
                attention_factor=1.5,
            ),
        ),
    ],
)
def test_old_and_new_rope_settings_mean_the_same(rope: dict[str, Any], expected: RopeScaling | None) -> None:
    base = without(LLAMA_3_1, "rope_scaling", "rope_theta")
    old = config_from_hf({**base, "rope_theta": 500000.0, "rope_scaling": rope})
    new = config_from_hf({**base, "rope_parameters": {"rope_theta": 500000.0, **rope}})
    assert old == new
    assert old.rope_scaling == expected
    assert old.rope_theta == 500000.0


GPT_OSS_20B = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "eos_token_id": 200002,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "quantization_config": {"modules_to_not_convert": ["model.layers.*.self_attn"], "quant_method": "mxfp4"},
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
}


def test_gpt_oss_20b() -> None:
    config = config_from_hf(GPT_OSS_20B)
    assert config.experts == ExpertsConfig(
        num_experts=32,
        experts_per_token=4,
        intermediate_size=2880,
        normalize_weights=True,
        bias=True,
        clamp=(1.702, 7.0),
    )
    assert (config.sliding_window, config.full_attention_layers) == (128, frozenset(range(1, 24, 2)))
    assert (config.attention_bias, config.attention_output_bias, config.attention_sinks) == (True, True, True)
    assert config.rope_scaling == RopeScaling(kind="yarn", factor=32.0, original_context_length=4096, truncate=False)
    assert config.context_length == 131072


def test_a_gpt_oss_that_is_not_supported_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="layer_types must list each of the 24 layers"):
        config_from_hf({**GPT_OSS_20B, "layer_types": ["full_attention"]})
    with pytest.raises(ValueError, match="layer_types chunked_attention"):
        config_from_hf({**GPT_OSS_20B, "layer_types": ["full_attention", "chunked_attention"] * 12})


def test_yarn_stretches_the_context() -> None:
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    assert config_from_hf({**QWEN_2_5, "rope_scaling": yarn}).context_length == 131072


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mamba"}, "model_type 'mamba'"),
        ({"model_type": None}, "model_type 'None'"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "type 'dynamic'"),
        ({"rope_scaling": {"type": "linear"}}, "'factor'"),
        ({"rope_scaling": {"full_attention": {"rope_type": "default"}}}, "one mapping for all layers"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"use_sliding_window": True, "max_window_layers": 20}, "sliding_window 131072"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quant_method 'gptq'"),
        ({"hidden_size": None}, "has no 'hidden_size'"),
        ({"num_attention_heads": 0}, "'num_attention_heads' must be an integer of at least 1, got 0"),
        ({"max_position_embeddings": 0.5}, "'max_position_embeddings' must be an integer of at least 1, got 0.5"),
        ({"num_key_value_heads": 3}, "num_kv_heads (3)"),
        ({"vocab_size": "many"}, "vocab_size"),
        ({"head_dim": 27}, "head_dim must be even"),
        ({"rope_theta": []}, "'rope_theta' must be a finite number above 0, got []"),
        ({"rope_theta": 0}, "'rope_theta' must be a finite number above 0, got 0"),
        ({"rms_norm_eps": "small"}, "'rms_norm_eps' must be a finite number above 0, got 'small'"),
        ({"rope_scaling": {"rope_type": ["linear"], "factor": 2.0}}, "type \"['linear']\" is not"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "'factor' must be a finite number above 0, got 0"),
        (
            {"rope_scaling": {"type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0}},
            "low_freq_factor must be below high_freq_factor, got 4.0 and 4.0",
        ),
        ({"layer_types": 5}, "'layer_types' must be a list, got 5"),
        ({"eos_token_id": {"a": 1}}, "'eos_token_id' must hold integers, got {'a': 1}"),
        ({"eos_token_id": [2, [3]]}, "'eos_token_id' must hold integers, got [3]"),
        ({"max_window_layers": "all"}, "'max_window_layers' must be an integer of at least 0, got 'all'"),
        ({"quantization_config": 4}, "quantization_config (quant_method 'unknown') is not supported"),
        ({"original_max_position_embeddings": "8k", **yarn()}, "'original_max_position_embeddings' must be an integer"),
        (yarn(original_max_position_embeddings="8k"), "'original_max_position_embeddings' must be an integer"),
        (yarn(attention_factor=[]), "'attention_factor' must be a finite number above 0, got []"),
        (yarn(beta_fast=[32]), "'beta_fast' must be a finite number above 0, got [32]"),
        (yarn(beta_slow="slow"), "'beta_slow' must be a finite number above 0, got 'slow'"),
        (yarn(mscale="1", mscale_all_dim=1), "'mscale' must be a finite number above 0, got '1'"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        config_from_hf({**QWEN_2_5, **changes})


def test_sliding_windows_that_no_layer_uses_are_fine() -> None:
    assert config_from_hf({**QWEN_2_5, "use_sliding_window": True}) == config_from_hf(QWEN_2_5)
    listed = {**QWEN_2_5, "layer_types": ["full_attention"] * 28}
    assert dataclasses.asdict(config_from_hf(listed)) == dataclasses.asdict(config_from_hf(QWEN_2_5))
