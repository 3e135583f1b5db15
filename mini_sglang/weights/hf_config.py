"""Reads a `ModelConfig` from a Hugging Face config.json and the files beside it.

It knows config.json's fields and, for each family, transformers' defaults for absent ones. What the engine does not
support is refused by name. It works without torch and reads no weights.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mini_sglang.errors import shorten
from mini_sglang.model_config import (
    MOST_LAYERS,
    MOST_SIZE,
    ExpertsConfig,
    ModelConfig,
    RopeScaling,
    stretched_length,
)
from mini_sglang.weights.quantization_config import Quantization, quantization_from_hf


def config_from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """Read a Hugging Face config.json. Raises ValueError that names a model type or setting that is not supported."""
    family = _family(config)
    config = {**_DEFAULTS, **family.defaults, **_without_nulls(config)}
    _refuse_unsupported(config, family)
    hidden_size, num_heads = _size(config, "hidden_size"), _size(config, "num_attention_heads")
    trained_length = _size(config, "max_position_embeddings")
    rope_theta, rope_scaling = _rope(config, trained_length)
    attention_bias = family.qkv_bias or bool(config.get("attention_bias"))
    return ModelConfig(
        architecture=config["model_type"],
        vocab_size=_size(config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_size(config, "intermediate_size"),
        num_layers=_size(config, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=_size(config, "num_key_value_heads", num_heads),
        head_dim=_size(config, "head_dim", hidden_size // num_heads),
        context_length=stretched_length(trained_length, rope_scaling),
        rms_norm_eps=_number("rms_norm_eps", config["rms_norm_eps"]),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        tie_word_embeddings=bool(config["tie_word_embeddings"]),
        attention_bias=attention_bias,
        attention_output_bias=attention_bias and not family.qkv_bias,
        mlp_bias=family.mlp_bias_allowed and bool(config.get("mlp_bias")),
        sliding_window=family.sliding_window(config),
        full_attention_layers=family.full_attention_layers(config),
        attention_sinks=family.attention_sinks,
        unrotated_layers=family.unrotated_layers(config),
        experts=family.experts(config),
        eos_token_ids=eos_token_ids(config),
    )


def end_token_ids(folder: Path) -> frozenset[int]:
    """All end tokens of a folder, from generation_config.json, config.json and the tokenizer."""
    settings = [_read_optional_json(folder / name) for name in ("config.json", "generation_config.json")]
    tokenizer_ids = _tokenizer_eos_ids(folder)
    return frozenset(tokenizer_ids).union(*(eos_token_ids(entry) for entry in settings))


def read_quantization(folder: Path) -> Quantization | None:
    """How the folder says that its weights are quantised, or None.

    AutoGPTQ and AutoAWQ once wrote a file of their own instead of a part of config.json.
    """
    config = _read_optional_json(folder / "config.json")
    if not config.get("quantization_config"):
        for name in ("quantize_config.json", "quant_config.json"):
            if stated := _read_optional_json(folder / name):
                method = "awq" if "w_bit" in stated or "zero_point" in stated else "gptq"
                return quantization_from_hf({"quantization_config": {"quant_method": method, **stated}})
    return quantization_from_hf(config)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises FileNotFoundError, or ValueError naming the file if it does not hold one."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value


def _read_optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _tokenizer_eos_ids(folder: Path) -> list[int]:
    """The id of tokenizer_config.json's end token, which not every config.json repeats."""
    path = folder / "tokenizer_config.json"
    settings = _read_optional_json(path)
    token = settings.get("eos_token")
    text = token.get("content") if isinstance(token, dict) else token
    if text is None:
        return []
    if not isinstance(text, str):
        raise ValueError(f"{path}: 'eos_token' must be a string, or hold one as 'content', got {shorten(token)}")
    decoder = settings.get("added_tokens_decoder")
    by_id = decoder if isinstance(decoder, dict) else {}
    named = [int(key) for key, entry in by_id.items() if key.isdecimal() and _content(entry) == text]
    if not named:
        added = _read_optional_json(folder / "tokenizer.json").get("added_tokens")
        entries = added if isinstance(added, list) else []
        named = _integers("id", [entry.get("id") for entry in entries if _content(entry) == text])
    return named[-1:]


def _content(entry: object) -> object:
    """The text of an added token."""
    return entry.get("content") if isinstance(entry, dict) else None


# -- the fields of config.json -----------------------------------------------------------------------------------------


def _without_nulls(config: Mapping[str, Any]) -> dict[str, Any]:
    """What the configuration says: null is an absent key, but for a window means none, and for hidden_act is wrong."""
    return {key: value for key, value in config.items() if value is not None or key in ("sliding_window", "hidden_act")}


def _window(config: Mapping[str, Any]) -> int | None:
    return None if config.get("sliding_window") is None else _size(config, "sliding_window")


def _qwen2_window(config: Mapping[str, Any]) -> int | None:
    """No window. Layers from max_window_layers on may have one that the others lack; such models are refused."""
    slides = _size(config, "max_window_layers", least=0) < _size(config, "num_hidden_layers")
    _refuse_window(config, slides=slides)
    return None


def _smollm3_window(config: Mapping[str, Any]) -> int | None:
    """No window. Layers without rotation may have one that the others lack; such models are refused."""
    _refuse_window(config, slides=bool(_smollm3_unrotated(config)))
    return None


def _refuse_window(config: Mapping[str, Any], *, slides: bool) -> None:
    """Refuse a window of some layers, unless `layer_types`, which is checked for every family, says otherwise."""
    window = config.get("sliding_window")
    if slides and window and config.get("use_sliding_window") and not config.get("layer_types"):
        raise ValueError(f"sliding_window {window} in some of the layers is not supported")


def _qwen3_moe_window(config: Mapping[str, Any]) -> int | None:
    return _window(config) if config.get("use_sliding_window") else None


def _smollm3_unrotated(config: Mapping[str, Any]) -> frozenset[int]:
    """The layers without rotation. Despite its name, `no_rope_layers` has a 1 for each layer that rotates.

    The list may be longer than the model.
    """
    layers = range(_size(config, "num_hidden_layers"))
    rotates = config.get("no_rope_layers")
    if rotates is None:
        interval = _size(config, "no_rope_layer_interval")
        rotates = [(layer + 1) % interval for layer in layers]
    if not isinstance(rotates, list) or len(rotates) < len(layers):
        raise ValueError(f"no_rope_layers must list each of the {len(layers)} layers, got {rotates!r}")
    return frozenset(layer for layer in layers if not rotates[layer])


def _mixtral_experts(config: Mapping[str, Any]) -> ExpertsConfig | None:
    return ExpertsConfig(
        num_experts=_size(config, "num_local_experts"),
        experts_per_token=_size(config, "num_experts_per_tok"),
        intermediate_size=_size(config, "intermediate_size"),
        normalize_weights=True,
    )


def _qwen3_moe_experts(config: Mapping[str, Any]) -> ExpertsConfig | None:
    number = "num_experts" if "num_experts" in config else "num_local_experts"  # before transformers 5, and since
    step, layers = _size(config, "decoder_sparse_step"), _size(config, "num_hidden_layers")
    named = _integers("mlp_only_layers", _list(config, "mlp_only_layers"))
    dense = {layer for layer in range(layers) if (layer + 1) % step}.union(named)
    return ExpertsConfig(
        num_experts=_size(config, number),
        experts_per_token=_size(config, "num_experts_per_tok"),
        intermediate_size=_size(config, "moe_intermediate_size"),
        normalize_weights=bool(config.get("norm_topk_prob")),
        dense_layers=frozenset(dense),
    )


def _gpt_oss_experts(config: Mapping[str, Any]) -> ExpertsConfig | None:
    return ExpertsConfig(
        num_experts=_size(config, "num_local_experts"),
        experts_per_token=_size(config, "num_experts_per_tok"),
        intermediate_size=_size(config, "intermediate_size"),
        normalize_weights=True,
        bias=True,
        clamp=(_number("swiglu_alpha", config["swiglu_alpha"]), _number("swiglu_limit", config["swiglu_limit"])),
    )


def _gpt_oss_full_layers(config: Mapping[str, Any]) -> frozenset[int]:
    """The layers without the window: every other one, unless `layer_types` says which."""
    layers = range(_size(config, "num_hidden_layers"))
    kinds = config.get("layer_types") or ["sliding_attention", "full_attention"] * len(layers)
    if not isinstance(kinds, list) or len(kinds) < len(layers):
        raise ValueError(f"layer_types must list each of the {len(layers)} layers, got {shorten(kinds)}")
    return frozenset(layer for layer in layers if kinds[layer] == "full_attention")


@dataclass(frozen=True)
class _Family:
    """What a family's config.json leaves out: transformers' defaults for absent keys, and fixed traits."""

    defaults: Mapping[str, Any]
    qkv_bias: bool = False  # q, k and v always have a bias, the output projection never
    mlp_bias_allowed: bool = False
    sliding_window: Callable[[Mapping[str, Any]], int | None] = lambda config: None  # the window that all layers share
    unrotated_layers: Callable[[Mapping[str, Any]], frozenset[int]] = lambda config: frozenset()
    experts: Callable[[Mapping[str, Any]], ExpertsConfig | None] = lambda config: None
    full_attention_layers: Callable[[Mapping[str, Any]], frozenset[int]] = lambda config: frozenset()  # beside a window
    attention_sinks: bool = False


_GPT_OSS_ROPE = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}
_DEFAULTS = {"rope_theta": 1e4, "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "max_position_embeddings": 32768}
_FAMILIES: Mapping[str, _Family] = {
    "gpt_oss": _Family(
        {
            "max_position_embeddings": 131072,
            "rope_theta": 150000.0,
            "rms_norm_eps": 1e-5,
            "head_dim": 64,
            "attention_bias": True,
            "sliding_window": 128,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0,
            "rope_scaling": _GPT_OSS_ROPE,
        },
        sliding_window=_window,
        experts=_gpt_oss_experts,
        full_attention_layers=_gpt_oss_full_layers,
        attention_sinks=True,
    ),
    "llama": _Family({"max_position_embeddings": 2048}, mlp_bias_allowed=True),
    "mistral": _Family({"max_position_embeddings": 131072, "sliding_window": 4096}, sliding_window=_window),
    "mixtral": _Family(
        {
            "max_position_embeddings": 131072,
            "rope_theta": 1e6,
            "rms_norm_eps": 1e-5,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
        sliding_window=_window,
        experts=_mixtral_experts,
    ),
    "olmo2": _Family({"max_position_embeddings": 2048, "rms_norm_eps": 1e-5}),
    "qwen2": _Family({"max_window_layers": 28}, qkv_bias=True, sliding_window=_qwen2_window),
    "qwen3": _Family({"max_window_layers": 28, "head_dim": 128}, sliding_window=_qwen2_window),
    "qwen3_moe": _Family(
        {
            "sliding_window": 4096,
            "decoder_sparse_step": 1,
            "num_local_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
        },
        sliding_window=_qwen3_moe_window,
        experts=_qwen3_moe_experts,
    ),
    "smollm3": _Family(
        {"rope_theta": 2e6, "tie_word_embeddings": True, "no_rope_layer_interval": 4},
        mlp_bias_allowed=True,
        sliding_window=_smollm3_window,
        unrotated_layers=_smollm3_unrotated,
    ),
}


def _family(config: Mapping[str, Any]) -> _Family:
    model_type = str(config.get("model_type"))
    if model_type not in _FAMILIES:
        supported = ", ".join(sorted(_FAMILIES))
        raise ValueError(f"model_type {model_type!r} is not supported; supported are {supported}")
    return _FAMILIES[model_type]


def _refuse_unsupported(config: Mapping[str, Any], family: _Family) -> None:
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise ValueError(f"hidden_act {activation!r} is not supported; only 'silu' is")
    quantization_from_hf(config)
    layer_types = set(map(str, _list(config, "layer_types")))
    if family.sliding_window(config) is not None and len(layer_types) <= 1:
        return
    if family.full_attention_layers(config):
        layer_types -= {"sliding_attention"}
    if layer_types - {"full_attention"}:
        kinds = ", ".join(sorted(layer_types - {"full_attention"}))
        raise ValueError(f"layer_types {kinds} (sliding_window {config.get('sliding_window')}) are not supported")


def _rope(config: Mapping[str, Any], trained_length: int) -> tuple[float, RopeScaling | None]:
    """The rotary base and scaling, from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling`."""
    key = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    rope: Mapping[str, Any] = config.get(key) or {}
    if not isinstance(rope, Mapping) or any(isinstance(value, Mapping) for value in rope.values()):
        raise ValueError(f"{key} must be one mapping for all layers, got {rope!r}")
    rope = _without_nulls(rope)
    theta = _number("rope_theta", rope.get("rope_theta", config["rope_theta"]))
    partial = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise ValueError(f"partial_rotary_factor {partial} is not supported; only 1.0 is")
    kind = str(rope.get("rope_type", rope.get("type", "default")))
    if kind == "default":
        return theta, None
    if kind not in _ROPE_READERS:
        supported = ", ".join(["default", *_ROPE_READERS])
        raise ValueError(f"{key} of type {kind!r} is not supported; supported are {supported}")
    key = "original_max_position_embeddings"
    return theta, _ROPE_READERS[kind](rope, _size(config, key, _size(rope, key, trained_length)), trained_length)


def _read_linear(rope: Mapping[str, Any], original: int, trained_length: int) -> RopeScaling:
    return RopeScaling(kind="linear", factor=_factor(rope, "factor"))


def _read_llama3(rope: Mapping[str, Any], original: int, trained_length: int) -> RopeScaling:
    low, high = _factor(rope, "low_freq_factor"), _factor(rope, "high_freq_factor")
    if low >= high:
        raise ValueError(f"low_freq_factor must be below high_freq_factor, got {low} and {high}")
    return RopeScaling(
        kind="llama3",
        factor=_factor(rope, "factor"),
        original_context_length=original,
        low_freq_factor=low,
        high_freq_factor=high,
    )


def _read_yarn(rope: Mapping[str, Any], original: int, trained_length: int) -> RopeScaling:
    factor = _number("factor", rope.get("factor", trained_length / original))
    attention_factor = rope.get("attention_factor")
    mscale, mscale_all_dim = rope.get("mscale"), rope.get("mscale_all_dim")
    if attention_factor is None and mscale and mscale_all_dim:
        magnitude = _yarn_magnitude(factor, _number("mscale", mscale))
        attention_factor = magnitude / _yarn_magnitude(factor, _number("mscale_all_dim", mscale_all_dim))
    return RopeScaling(
        kind="yarn",
        factor=factor,
        original_context_length=original,
        beta_fast=_number("beta_fast", rope.get("beta_fast") or 32.0),
        beta_slow=_number("beta_slow", rope.get("beta_slow") or 1.0),
        attention_factor=None if attention_factor is None else _number("attention_factor", attention_factor),
        truncate=rope.get("truncate") is not False,
    )


def _yarn_magnitude(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


_ROPE_READERS: Mapping[str, Callable[[Mapping[str, Any], int, int], RopeScaling]] = {
    "linear": _read_linear,
    "llama3": _read_llama3,
    "yarn": _read_yarn,
}


def eos_token_ids(config: Mapping[str, Any]) -> frozenset[int]:
    """The `eos_token_id` of a config.json or generation_config.json: an id, a list of ids, or absent."""
    value = config.get("eos_token_id")
    values = value if isinstance(value, (list, tuple)) else [value]
    return frozenset(_integers("eos_token_id", [token_id for token_id in values if token_id is not None]))


def _size(config: Mapping[str, Any], key: str, default: int | None = None, least: int = 1) -> int:
    """An integer of at least `least`; without a default the key must be there."""
    value = config.get(key, default)
    if value is None:
        raise ValueError(f"config.json has no {key!r}")
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"config.json: {key!r} must be an integer of at least {least}, got {value!r}")
    if value > (most := MOST_LAYERS if key == "num_hidden_layers" else MOST_SIZE):
        raise ValueError(f"config.json: {key!r} must be at most {most}, got {shorten(value)}")
    return value


_LARGEST = sys.float_info.max


def _factor(rope: Mapping[str, Any], key: str) -> float:
    if key not in rope:
        raise ValueError(f"the rope scaling of config.json needs a number {key!r}")
    return _number(key, rope[key])


def _number(key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= _LARGEST:
        raise ValueError(f"config.json: {key!r} must be a finite number above 0, got {value!r}")
    return float(value)


def _list(config: Mapping[str, Any], key: str) -> list[Any]:
    """The list under `key`; empty if the key is absent."""
    value = config.get(key, [])
    if not isinstance(value, list):
        raise ValueError(f"config.json: {key!r} must be a list, got {value!r}")
    return value


def _integers(key: str, values: list[Any]) -> list[int]:
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError(f"{key!r} must hold integers, got {value!r}")
    return values
