"""Qwen2 and Qwen2.5: Llama with a bias on q, k and v, which the config carries as `attention_bias`."""

from __future__ import annotations

from mini_sglang.layers.placement import Placement
from mini_sglang.model_config import ModelConfig
from mini_sglang.models.llama import llama
from mini_sglang.models.transformer import Transformer


def qwen2(config: ModelConfig, placement: Placement) -> Transformer:
    return llama(config, placement)
