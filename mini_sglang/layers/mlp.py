"""The gated feed-forward layer (SwiGLU, Shazeer, arXiv 2002.05202)."""

from __future__ import annotations

from mini_sglang.kernels.interface import Residual
from mini_sglang.layers.linear import Linear
from mini_sglang.layers.norm import BlockNorms
from mini_sglang.layers.placement import Placement
from mini_sglang.model_config import ModelConfig
from mini_sglang.weights.tensor import WeightSlot


class GatedMLP:
    """x + down(silu(gate(x')) * up(x')), x' normalised as `norms` say; gate and up are stacked into one matmul."""

    def __init__(self, config: ModelConfig, placement: Placement, layer: int, norms: BlockNorms) -> None:
        size = placement.parallel.shard(config.intermediate_size)
        parts = {"gate_proj": size, "up_proj": size}
        down = {"down_proj": config.hidden_size}
        self._down = Linear(size, down, placement, bias=config.mlp_bias, summed=True, norms=norms)
        self._gate_up = Linear(
            config.hidden_size, parts, placement, bias=config.mlp_bias, norms=norms, prefetched=self._down
        )

    def __call__(self, residual: Residual) -> Residual:
        """x [tokens, hidden] -> the same shape"""
        return self._down.add_to(residual.x, self._gate_up.gated(residual))

    def weight_slots(self, prefix: str) -> dict[str, WeightSlot]:
        return self._gate_up.weight_slots(prefix) | self._down.weight_slots(prefix)
