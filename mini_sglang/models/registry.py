"""Which function builds which architecture. A new architecture adds a file and a line here."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from mini_sglang.layers.placement import Placement
from mini_sglang.model_config import ModelConfig
from mini_sglang.models.llama import llama
from mini_sglang.models.mistral import mistral
from mini_sglang.models.mixtral import mixtral
from mini_sglang.models.olmo2 import olmo2
from mini_sglang.models.qwen2 import qwen2
from mini_sglang.models.qwen3 import qwen3
from mini_sglang.models.qwen3_moe import qwen3_moe
from mini_sglang.models.smollm3 import smollm3
from mini_sglang.models.transformer import Transformer

ARCHITECTURES: Mapping[str, Callable[[ModelConfig, Placement], Transformer]] = {
    "llama": llama,
    "mistral": mistral,
    "mixtral": mixtral,
    "olmo2": olmo2,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "qwen3_moe": qwen3_moe,
    "smollm3": smollm3,
}


def build_model(config: ModelConfig, placement: Placement) -> Transformer:
    """An empty model; its `weight_slots` say what to load. Raises ValueError for an unknown architecture."""
    try:
        builder = ARCHITECTURES[config.architecture]
    except KeyError:
        known = ", ".join(sorted(ARCHITECTURES))
        raise ValueError(f"architecture must be one of {known}, got {config.architecture!r}") from None
    return builder(config, placement)
