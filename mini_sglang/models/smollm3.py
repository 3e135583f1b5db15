"""SmolLM3: Llama with no rotation in some layers, which the config names and the skeleton's rotary tables keep to."""

from __future__ import annotations

from mini_sglang.layers.placement import Placement
from mini_sglang.model_config import ModelConfig
from mini_sglang.models.llama import llama
from mini_sglang.models.transformer import Transformer


def smollm3(config: ModelConfig, placement: Placement) -> Transformer:
    return llama(config, placement)
