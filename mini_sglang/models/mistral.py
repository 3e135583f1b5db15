"""Mistral: Llama whose attention may slide; the config carries the window, and the attention backend keeps to it."""

from __future__ import annotations

from mini_sglang.layers.placement import Placement
from mini_sglang.model_config import ModelConfig
from mini_sglang.models.llama import llama
from mini_sglang.models.transformer import Transformer


def mistral(config: ModelConfig, placement: Placement) -> Transformer:
    return llama(config, placement)
