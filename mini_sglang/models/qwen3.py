"""Qwen3: no bias, and each head of q and k is normalised before it is rotated."""

from __future__ import annotations

from functools import partial

from mini_sglang.layers.attention import Attention
from mini_sglang.layers.mlp import GatedMLP
from mini_sglang.layers.placement import Placement
from mini_sglang.model_config import ModelConfig
from mini_sglang.models.transformer import Transformer


def qwen3(config: ModelConfig, placement: Placement) -> Transformer:
    return Transformer(config, placement, attention=partial(Attention, qk_norm="heads"), mlp=GatedMLP)
