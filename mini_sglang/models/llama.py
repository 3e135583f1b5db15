"""Llama 2 to 3.3 and everything built like them (SmolLM2 too): the skeleton as it is."""

from __future__ import annotations

from mini_sglang.layers.attention import Attention
from mini_sglang.layers.mlp import GatedMLP
from mini_sglang.layers.placement import Placement
from mini_sglang.model_config import ModelConfig
from mini_sglang.models.transformer import Transformer


def llama(config: ModelConfig, placement: Placement) -> Transformer:
    return Transformer(config, placement, attention=Attention, mlp=GatedMLP)
