"""The gated feed-forward layer (SwiGLU, Shazeer, arXiv 2002.05202)."""

from __future__ import annotations

from mini_sglang.kernels.interface import Residual
from mini_sglang.layers.linear import Linear
from mini_sglang.layers.norm import RMSNorm
from mini_sglang.layers.placement import Placement
from mini_sglang.model_config import ModelConfig
from mini_sglang.weights.tensor import WeightSlot


class GatedMLP:
    """down(silu(gate(x)) * up(x)), gate and up stacked into one product; `post_norm` as in `Attention`."""

    def __init__(self, config: ModelConfig, placement: Placement, layer: int, *, post_norm: bool = False) -> None:
        self._post_norm = post_norm
        size = placement.parallel.shard(config.intermediate_size)
        parts = {"gate_proj": size, "up_proj": size}
        self._gate_up = Linear(config.hidden_size, parts, placement, bias=config.mlp_bias)
        self._down = Linear(size, {"down_proj": config.hidden_size}, placement, bias=config.mlp_bias, summed=True)

    def __call__(self, stream: Residual, norm: RMSNorm, then: RMSNorm | None = None) -> Residual:
        """x [tokens, hidden] -> x + mlp(norm(x)), with `post_norm` x + norm(mlp(x)); `then` as in `Attention`"""
        before, after = (None, norm) if self._post_norm else (norm, None)
        gated = self._gate_up.gated(*stream.before(before), prefetch=self._down.weight)
        return self._down.add_to(stream.x, gated, after, then)

    def weight_slots(self, prefix: str) -> dict[str, WeightSlot]:
        return self._gate_up.weight_slots(prefix) | self._down.weight_slots(prefix)
