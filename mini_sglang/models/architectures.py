"""What each family of models does differently from Llama: one entry each.

A new family adds an entry here and its `model_type` in `weights/hf_config.py`; CONTRIBUTING.md has the whole list.

Sizes and switches come from the config and are honoured where they apply: a sliding window in the attention backends,
layers without rotation in the rotary tables, biases in the linear layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from mini_sglang.layers.attention import Attention
from mini_sglang.layers.mlp import GatedMLP
from mini_sglang.layers.moe import MixtureOfExperts
from mini_sglang.layers.norm import BlockNorms
from mini_sglang.layers.placement import Placement
from mini_sglang.model_config import ModelConfig
from mini_sglang.models.transformer import Architecture, MLPPart, Transformer


def experts_or_dense(config: ModelConfig, placement: Placement, layer: int, norms: BlockNorms) -> MLPPart:
    """A mixture of experts in all layers but those that the config calls dense."""
    is_dense = config.experts is None or layer in config.experts.dense_layers
    return (GatedMLP if is_dense else MixtureOfExperts)(config, placement, layer, norms)


ARCHITECTURES: Mapping[str, Architecture] = {
    # a mixture of experts in every layer, windows in every other one, attention sinks, biases (arXiv 2508.10925)
    "gpt_oss": Architecture(mlp=MixtureOfExperts),
    # Llama 2 to 3.3 and everything built like them, SmolLM2 too: the skeleton as it is
    "llama": Architecture(),
    # attention may slide over a window
    "mistral": Architecture(),
    # Mistral with a mixture of experts in every layer (Jiang et al., arXiv 2401.04088)
    "mixtral": Architecture(mlp=MixtureOfExperts),
    # norms after attention and MLP, not before them, and norms of q and k (arXiv 2501.00656)
    "olmo2": Architecture(
        attention=partial(Attention, qk_norm="whole"),
        post_norm=True,
        norm_names=("post_attention_layernorm", "post_feedforward_layernorm"),
    ),
    # a bias on q, k and v
    "qwen2": Architecture(),
    # no bias; each head of q and k is normalised before it is rotated
    "qwen3": Architecture(attention=partial(Attention, qk_norm="heads")),
    # Qwen3 with a mixture of experts
    "qwen3_moe": Architecture(attention=partial(Attention, qk_norm="heads"), mlp=experts_or_dense),
    # no rotation in every fourth layer
    "smollm3": Architecture(),
}


def build_model(config: ModelConfig, placement: Placement) -> Transformer:
    """An empty model; its `weight_slots` say what to load. Raises ValueError for an unknown architecture."""
    if config.architecture not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise ValueError(f"architecture must be one of {known}, got {config.architecture!r}")
    return Transformer(config, placement, ARCHITECTURES[config.architecture])
