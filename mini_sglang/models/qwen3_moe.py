"""Qwen3-MoE: Qwen3 with a mixture of experts in all layers but those that the config calls dense."""

from __future__ import annotations

from functools import partial

from mini_sglang.layers.attention import Attention
from mini_sglang.layers.mlp import GatedMLP
from mini_sglang.layers.moe import MixtureOfExperts
from mini_sglang.layers.placement import Placement
from mini_sglang.model_config import ModelConfig
from mini_sglang.models.transformer import MLPPart, Transformer


def qwen3_moe(config: ModelConfig, placement: Placement) -> Transformer:
    return Transformer(config, placement, attention=partial(Attention, qk_norm="heads"), mlp=_mlp)


def _mlp(config: ModelConfig, placement: Placement, layer: int) -> MLPPart:
    is_dense = config.experts is None or layer in config.experts.dense_layers
    return GatedMLP(config, placement, layer) if is_dense else MixtureOfExperts(config, placement, layer)
