"""The shape of a model: what a checkpoint's config says, in one vocabulary for all families and file formats.

Plain numbers and switches, checked where they are read, so that no later layer meets a setting that it would have to
ignore. It knows no tensors and no files: `weights/hf_config.py` and `weights/gguf_config.py` read those.
"""

from __future__ import annotations

from dataclasses import dataclass

MOST_SIZE = 2**53  # of any one number: more is a damaged file
MOST_LAYERS = 10_000


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the trained context. Fields not used by a kind keep their default.

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
    truncate: bool = True  # yarn: between whole dimensions


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """The routed feed-forward layers of a mixture of experts.

    Raises ValueError if a token needs more experts than there are.
    """

    num_experts: int
    experts_per_token: int
    intermediate_size: int  # of one expert
    normalize_weights: bool  # the weights of a token's chosen experts add up to 1
    dense_layers: frozenset[int] = frozenset()  # layers with one MLP of the model's `intermediate_size` instead
    bias: bool = False  # of the router and of every expert's matrices
    clamp: tuple[float, float] | None = None  # alpha and limit of a clamped gate (gpt-oss); None: the gate is silu

    def __post_init__(self) -> None:
        if self.experts_per_token > self.num_experts:
            raise ValueError(f"experts_per_token ({self.experts_per_token}) exceeds num_experts ({self.num_experts})")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes and switches of a decoder-only transformer, as read from config.json or GGUF metadata.

    Raises ValueError, naming the field, when sizes do not fit each other.
    """

    architecture: str  # key of ARCHITECTURES: "llama", "qwen3_moe", ...
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
    sliding_window: int | None = None  # positions that a token sees in each layer, its own included; None: all
    full_attention_layers: frozenset[int] = frozenset()  # layers in which a token sees all positions all the same
    attention_sinks: bool = False  # each head has a score of no position, which takes its share of the softmax
    unrotated_layers: frozenset[int] = frozenset()  # layers without rotary embedding (SmolLM3)
    experts: ExpertsConfig | None = None  # None: every layer has one MLP
    eos_token_ids: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        for name in _SIZES:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
            if value > (most := MOST_LAYERS if name == "num_layers" else MOST_SIZE):
                raise ValueError(f"{name} must be at most {most}, got {value}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads ({self.num_heads}) must be a multiple of num_kv_heads ({self.num_kv_heads})")
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary embeddings, got {self.head_dim}")
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ValueError(f"sliding_window must be at least 1, got {self.sliding_window}")


_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "context_length",
)


def stretched_length(trained_length: int, scaling: RopeScaling | None) -> int:
    """The usable context length. Checkpoints with yarn often keep the trained length in `max_position_embeddings`."""
    if scaling is None or scaling.kind != "yarn":
        return trained_length
    return max(trained_length, int(min(scaling.original_context_length * scaling.factor, 2.0 * MOST_SIZE)))
