"""Reads a `ModelConfig` from the metadata of a GGUF file.

It knows GGUF's keys and llama.cpp's conventions. It works without torch and reads no weights.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from mini_sglang.errors import shorten
from mini_sglang.model_config import (
    MOST_LAYERS,
    MOST_SIZE,
    ExpertsConfig,
    ModelConfig,
    RopeScaling,
    stretched_length,
)
from mini_sglang.weights.gguf_file import GGUFFile

# GGUF metadata names one end token; chat models have more. These texts end a turn or a document in the model families
# that use them, and llama.cpp goes by the text too.
END_TOKEN_TEXTS = frozenset(
    {
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end|>",
        "<|end_of_text|>",
        "<|endoftext|>",
        "<end_of_turn>",
        "<EOT>",
    }
)
_CONTROL_TOKEN = 3  # gguf's token type
_GGUF_ARCHITECTURES = ("llama", "olmo2", "qwen2", "qwen3", "qwen3moe", "smollm3")
_RENAMED = {"qwen3moe": "qwen3_moe"}


def config_from_gguf(file: GGUFFile) -> ModelConfig:
    """The configuration in a GGUF file. What the metadata leave out is taken from the tensors that exist.

    Raises ValueError, naming the key, for what is missing or not supported.
    """
    architecture = file.metadata.get("general.architecture")
    if architecture not in _GGUF_ARCHITECTURES:
        supported = ", ".join(_GGUF_ARCHITECTURES)
        raise ValueError(f"GGUF architecture {architecture!r} is not supported; supported are {supported}")
    keys = _Keys(file, architecture)
    experts = _experts(keys) if keys.optional("expert_count", 0) else None
    if experts is not None and architecture not in ("llama", "qwen3moe"):
        raise ValueError(f"GGUF expert_count {experts.num_experts} is not supported for architecture {architecture!r}")
    if architecture == "olmo2" and (window := keys.optional("attention.sliding_window", 0)):  # so it is an OLMo 3
        raise ValueError(f"GGUF attention.sliding_window {window} is not supported for architecture {architecture!r}")
    hidden_size, num_heads = keys.size("embedding_length"), keys.head_count("attention.head_count")
    num_layers = keys.size("block_count", most=MOST_LAYERS)
    head_dim = keys.size("attention.key_length", hidden_size // num_heads)
    for name in ("attention.value_length", "rope.dimension_count"):
        if keys.optional(name, head_dim) != head_dim:
            raise ValueError(f"GGUF {name} {keys.optional(name, head_dim)} must equal the head size {head_dim}")
    trained_length = keys.size("context_length")
    rope_scaling = _rope_scaling(keys, head_dim, trained_length)
    embedding = file.tensors.get("token_embd.weight")
    return ModelConfig(
        # llama.cpp stores Mistral and Mixtral as kinds of Llama
        architecture="mixtral" if architecture == "llama" and experts else _RENAMED.get(architecture, architecture),
        vocab_size=embedding.shape[0] if embedding else len(metadata_list(file.metadata, "tokenizer.ggml.tokens")),
        hidden_size=hidden_size,
        intermediate_size=keys.size("feed_forward_length"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=keys.head_count("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        context_length=stretched_length(trained_length, rope_scaling),
        rms_norm_eps=keys.number("attention.layer_norm_rms_epsilon"),
        rope_theta=keys.number("rope.freq_base", 10000.0),
        rope_scaling=rope_scaling,
        tie_word_embeddings="output.weight" not in file.tensors,
        attention_bias="blk.0.attn_q.bias" in file.tensors,
        attention_output_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_gate.bias" in file.tensors,
        # every fourth: no metadata say so, llama.cpp has it in its code
        unrotated_layers=frozenset(range(3, num_layers, 4)) if architecture == "smollm3" else frozenset(),
        experts=experts,
        eos_token_ids=gguf_end_token_ids(file.metadata),
    )


class _Keys:
    """The metadata under the architecture's own prefix."""

    def __init__(self, file: GGUFFile, architecture: str) -> None:
        self.file = file
        self._prefix = architecture

    def required(self, name: str) -> Any:
        value = self.optional(name, None)
        if value is None:
            raise ValueError(f"GGUF metadata has no {self._prefix}.{name}")
        return value

    def optional(self, name: str, default: Any) -> Any:
        return self.file.metadata.get(f"{self._prefix}.{name}", default)

    def size(self, name: str, default: int | None = None, *, most: int = MOST_SIZE) -> int:
        """An integer between 1 and `most`; without a default the key must be there."""
        return self._checked_size(name, self.required(name) if default is None else self.optional(name, default), most)

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number above 0, as it was written; without a default the key must be there."""
        value = self.required(name) if default is None else self.optional(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise ValueError(f"GGUF {self._prefix}.{name} must be a finite number above 0, got {shorten(value)}")
        return _as_written(value)

    def head_count(self, name: str, default: int | None = None) -> int:
        value = self.required(name) if default is None else self.optional(name, default)
        counts = value if isinstance(value, list) else [value]
        if any(count != counts[0] for count in counts):
            raise ValueError(f"GGUF {name} differs between layers, which is not supported: {shorten(str(value))}")
        return self._checked_size(name, counts[0] if counts else None, MOST_SIZE)

    def _checked_size(self, name: str, value: object, most: int) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"GGUF {self._prefix}.{name} must be an integer of at least 1, got {shorten(value)}")
        if value > most:
            raise ValueError(f"GGUF {self._prefix}.{name} must be at most {most}, got {shorten(value)}")
        return value


def _experts(keys: _Keys) -> ExpertsConfig:
    """The mixture of experts: a layer with a router has them; weights are normalised unless the file says otherwise."""
    layers = range(keys.size("block_count", most=MOST_LAYERS))
    routers = {layer: f"blk.{layer}.ffn_gate_inp.weight" for layer in layers}
    return ExpertsConfig(
        num_experts=keys.size("expert_count"),
        experts_per_token=keys.size("expert_used_count"),
        intermediate_size=keys.size("expert_feed_forward_length", keys.size("feed_forward_length")),
        normalize_weights=bool(keys.optional("expert_weights_norm", True)),
        dense_layers=frozenset(layer for layer, router in routers.items() if router not in keys.file.tensors),
    )


def _as_written(value: float) -> float:
    """The shortest decimal that gives this float32: metadata hold 1e-5 as 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def gguf_end_token_ids(metadata: Mapping[str, Any]) -> frozenset[int]:
    """All end tokens of a GGUF file: those that the metadata name, and control tokens whose text is an end token's."""
    named = {kind: metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")}
    for kind, token_id in named.items():
        if not isinstance(token_id, (int, type(None))):
            raise ValueError(f"GGUF tokenizer.ggml.{kind}_token_id must be an integer, got {shorten(token_id)}")
    tokens, kinds = (metadata_list(metadata, f"tokenizer.ggml.{name}") for name in ("tokens", "token_type"))
    typed = enumerate(zip(tokens, kinds, strict=False))
    by_text = [i for i, (text, kind) in typed if kind == _CONTROL_TOKEN and text in END_TOKEN_TEXTS]
    return frozenset(token_id for token_id in [*named.values(), *by_text] if token_id is not None)


def metadata_list(metadata: Mapping[str, Any], key: str) -> list[Any]:
    """The list under `key`; empty if the key is absent. Raises ValueError for what is no list."""
    value = metadata.get(key, [])
    if not isinstance(value, list):
        raise ValueError(f"GGUF {key} must be a list, got {shorten(value)}")
    return value


def _rope_scaling(keys: _Keys, head_dim: int, trained_length: int) -> RopeScaling | None:
    if "rope_freqs.weight" in keys.file.tensors:
        theta = keys.number("rope.freq_base", 10000.0)
        info = keys.file.tensors["rope_freqs.weight"]
        if info.type.name != "F32" or info.shape != (head_dim // 2,):
            raise ValueError(
                f"GGUF rope_freqs.weight must hold {head_dim // 2} factors in F32, got {info.type.name} of {info.shape}"
            )
        return llama3_scaling(keys.file.read(info).view(np.float32).reshape(-1), theta, head_dim)
    kind = keys.optional("rope.scaling.type", "none")
    if kind == "none":
        return None
    factor = keys.number("rope.scaling.factor")
    if kind == "linear":
        return RopeScaling(kind="linear", factor=factor)
    if kind != "yarn":
        raise ValueError(f"GGUF rope.scaling.type {kind!r} is not supported; supported are none, linear, yarn")
    # llama.cpp multiplies its attn_factor with yarn's own magnitude; transformers' attention_factor is the product.
    extra = keys.number("rope.scaling.yarn_attn_factor", keys.number("rope.scaling.attn_factor", 1.0))
    return RopeScaling(
        kind="yarn",
        factor=factor,
        original_context_length=keys.size("rope.scaling.original_context_length", trained_length),
        beta_fast=keys.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=keys.number("rope.scaling.yarn_beta_slow", 1.0),
        attention_factor=None if extra == 1.0 else extra * (0.1 * math.log(factor) + 1.0),
    )


def llama3_scaling(factors: npt.NDArray[np.float32], theta: float, head_dim: int) -> RopeScaling:
    """The Llama 3.1 scaling whose divisors of the rotary frequencies are `factors`, [head_dim / 2].

    llama.cpp keeps the divisors instead of the parameters. The two frequency bounds scale with the original length, so
    the released 1 and 4 can be assumed; the length follows from any divisor between 1 and the factor. Raises ValueError
    if no such scaling gives these divisors.
    """
    factor = _as_written(float(factors.max()))
    wavelengths = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    between = np.flatnonzero((factors > 1) & (factors < factor))
    if factor > 1 and len(between):
        # 1 / divisor = (1 - s) / factor + s with s = (length / wavelength - low) / (high - low)
        smooth = (1 / factors[between].astype(np.float64) - 1 / factor) / (1 - 1 / factor)
        length = round(float(np.median((smooth * 3 + 1) * wavelengths[between])))
        scaling = RopeScaling(kind="llama3", factor=factor, original_context_length=length)
        if np.allclose(llama3_divisors(scaling, theta, head_dim), factors, rtol=1e-3):
            return scaling
    raise ValueError("GGUF rope_freqs.weight holds factors of no Llama 3.1 scaling; other scalings are not supported")


def llama3_divisors(scaling: RopeScaling, theta: float, head_dim: int) -> npt.NDArray[np.float64]:
    """The divisors of the rotary frequencies in a Llama 3.1 scaling, [head_dim / 2]."""
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    turns = scaling.original_context_length / (2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim))
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    divisors: npt.NDArray[np.float64] = 1 / ((1 - smooth) / scaling.factor + smooth)
    return divisors
