"""OLMo 2 (arXiv 2501.00656): norms of what attention and MLP put out, not of what they take in; and of q and k."""

from __future__ import annotations

from functools import partial

from mini_sglang.layers.attention import Attention
from mini_sglang.layers.mlp import GatedMLP
from mini_sglang.layers.placement import Placement
from mini_sglang.model_config import ModelConfig
from mini_sglang.models.transformer import Transformer


def olmo2(config: ModelConfig, placement: Placement) -> Transformer:
    return Transformer(
        config,
        placement,
        attention=partial(Attention, qk_norm="whole", post_norm=True),
        mlp=partial(GatedMLP, post_norm=True),
        norms=("post_attention_layernorm", "post_feedforward_layernorm"),
    )
