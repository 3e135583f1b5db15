"""The shape of a model: what a checkpoint's config says, in one vocabulary for every family and file format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the trained context. Fields a kind does not use keep their default.

    Definitions: `linear` divides positions by `factor`; `llama3` as in Meta's Llama 3.1 release; `yarn` as in
    Peng et al., "YaRN" (arXiv 2309.00071), with transformers' field names.
    """

    kind: str  # "linear" | "llama3" | "yarn"
    factor: float
    original_context_length: int = 0  # llama3, yarn
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn; None: 0.1 * ln(factor) + 1


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes and switches of a decoder-only transformer, as read from config.json or GGUF metadata."""

    architecture: str  # key of the model registry: "llama" | "qwen2" | "qwen3"
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context_length: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False  # bias on q, k and v (Qwen2)
    attention_output_bias: bool = False
    mlp_bias: bool = False
    dtype: str = "float32"  # of the checkpoint: "float32" | "bfloat16" | "float16"
    bos_token_id: int | None = None
    eos_token_ids: frozenset[int] = frozenset()

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None) -> ModelConfig:
        """Read a Hugging Face config.json (and generation_config.json, whose end tokens count too).

        Raises ValueError for a model type or a setting that is not supported, naming it.
        """
        raise NotImplementedError
