"""Mixtral (Jiang et al., arXiv 2401.04088): Mistral with a mixture of experts in every layer."""

from __future__ import annotations

from mini_sglang.layers.attention import Attention
from mini_sglang.layers.moe import MixtureOfExperts
from mini_sglang.layers.placement import Placement
from mini_sglang.model_config import ModelConfig
from mini_sglang.models.transformer import Transformer


def mixtral(config: ModelConfig, placement: Placement) -> Transformer:
    return Transformer(config, placement, attention=Attention, mlp=MixtureOfExperts)
