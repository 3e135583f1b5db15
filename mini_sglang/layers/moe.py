"""A mixture of experts: a router chooses a few MLPs for each token, and their outputs are summed by its weights.

This layer routes and holds the weights; grouping tokens by expert is left to the kernels' `Experts`.
Every token reaches all experts chosen for it: there is no capacity, so none is dropped.
"""

from __future__ import annotations

import torch

from mini_sglang.kernels.interface import Residual
from mini_sglang.layers.linear import Linear
from mini_sglang.layers.norm import BlockNorms
from mini_sglang.layers.placement import Placement
from mini_sglang.model_config import ModelConfig
from mini_sglang.parallel.sharding import Shard, whole
from mini_sglang.weights.tensor import CheckpointTensor, WeightSlot


class MixtureOfExperts:
    """Top-k routing by the softmax over all experts (Shazeer et al., arXiv 1701.06538); experts are gated MLPs."""

    def __init__(self, config: ModelConfig, placement: Placement, layer: int, norms: BlockNorms) -> None:
        if config.experts is None or norms.before is None:
            raise ValueError(f"architecture {config.architecture!r} needs experts and a norm in front of them")
        self._norm = norms.before.parameters
        self._experts_per_token = config.experts.experts_per_token
        self._normalize = config.experts.normalize_weights
        self._kernels = placement.kernels
        self._parallel = placement.parallel
        number, hidden = config.experts.num_experts, config.hidden_size
        self._hidden, self._inner = whole(hidden), placement.parallel.shard(config.experts.intermediate_size)
        size = self._inner.size  # each rank holds a part of every expert
        self._router = Linear(hidden, {"gate": number}, placement, quantized=False)
        # gate above up, as in GatedMLP; memory that no tensor has filled is not touched
        self._gate_up = torch.empty(number, 2 * size, hidden, dtype=placement.dtype, device=placement.device)
        self._down = torch.empty(number, hidden, size, dtype=placement.dtype, device=placement.device)
        self._experts = placement.kernels.experts(self._gate_up, self._down)

    def __call__(self, residual: Residual) -> Residual:
        """x [tokens, hidden] -> x + the weighted sum of the chosen experts' outputs for norm(x)"""
        x, normed = residual
        if normed is None:
            normed = self._kernels.rms_norm(x, self._norm.weight, self._norm.eps)
        logits = self._router(Residual(normed))
        ids, weights = self._kernels.route(logits, self._experts_per_token, normalize=self._normalize)
        if self._parallel.size == 1:
            return Residual(self._experts.add_to(x, normed, ids, weights))
        part = self._experts.add_to(torch.zeros_like(x), normed, ids, weights)
        return Residual(self._parallel.all_reduce(part, x))

    def weight_slots(self, prefix: str) -> dict[str, WeightSlot]:
        slots = self._router.weight_slots(prefix)
        for expert, (gate_up, down) in enumerate(zip(self._gate_up, self._down, strict=True)):
            gate, up = gate_up.chunk(2)
            for name, part in (("gate_proj", gate), ("up_proj", up)):
                slots[f"{prefix}.experts.{expert}.{name}.weight"] = _slot(part, self._inner, self._hidden)
            slots[f"{prefix}.experts.{expert}.down_proj.weight"] = _slot(down, self._hidden, self._inner)
        return slots


def _slot(part: torch.Tensor, rows: Shard, columns: Shard) -> WeightSlot:
    def load(tensor: CheckpointTensor) -> None:
        tensor.copy_to(part, rows, columns)

    return WeightSlot((rows.full, columns.full), load)
