"""A mixture of experts: a router chooses a few MLPs for each token, and their outputs are summed by its weights.

This layer routes and loads the weights; grouping tokens by expert is left to the kernels' `Experts`.
Every token reaches all experts chosen for it: there is no capacity, so none is dropped.
"""

from __future__ import annotations

import torch

from mini_sglang.kernels.interface import Clamp, Experts, ExpertVariant, Residual
from mini_sglang.layers.linear import Linear
from mini_sglang.layers.norm import BlockNorms
from mini_sglang.layers.placement import Placement
from mini_sglang.model_config import ModelConfig
from mini_sglang.parallel.sharding import whole
from mini_sglang.weights.tensor import WeightSlot


class MixtureOfExperts:
    """Top-k routing by the softmax over all experts (Shazeer et al., arXiv 1701.06538); experts are gated MLPs.

    With normalised weights that is the softmax over the chosen ones.
    """

    def __init__(self, config: ModelConfig, placement: Placement, layer: int, norms: BlockNorms) -> None:
        if config.experts is None or norms.before is None:
            raise ValueError(f"architecture {config.architecture!r} needs experts and a norm in front of them")
        self._norm = norms.before.parameters
        self._number, self._experts_per_token = config.experts.num_experts, config.experts.experts_per_token
        self._normalize = config.experts.normalize_weights
        self._kernels = placement.kernels
        self._parallel = placement.parallel
        bias, clamp = config.experts.bias, config.experts.clamp
        self._clamp = None if clamp is None else Clamp(*clamp)
        # each rank holds a part of every expert
        hidden, inner = whole(config.hidden_size), placement.parallel.shard(config.experts.intermediate_size)
        self._router = Linear(hidden, {"gate": self._number}, placement, bias=bias, quantized=False)
        experts = range(self._number)  # one below the other, of each gate above up, as in GatedMLP
        gates = {f"{expert}.{part}": inner for expert in experts for part in ("gate_proj", "up_proj")}
        downs = {f"{expert}.down_proj": hidden for expert in experts}
        self._gate_up = placement.arriving(gates, hidden, bias=bias)
        self._down = placement.arriving(downs, inner, bias=bias)
        self._experts: Experts | None = None

    def __call__(self, residual: Residual) -> Residual:
        """x [tokens, hidden] -> x + the weighted sum of the chosen experts' outputs for norm(x)"""
        assert self._experts is not None, f"never arrived: {self._gate_up.missing | self._down.missing}"
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
        for matrix in (self._gate_up, self._down):
            slots |= matrix.slots(f"{prefix}.experts", self._lay_out)
        return slots

    def _lay_out(self) -> None:
        if self._gate_up.missing or self._down.missing:
            return
        down_bias = self._down.bias if self._parallel.rank == 0 else None  # added once
        biases = [None if bias is None else bias.view(self._number, -1) for bias in (self._gate_up.bias, down_bias)]
        variant = ExpertVariant(biases[0], biases[1], self._clamp)
        gate_up, down = self._gate_up.stored(), self._down.stored()
        if gate_up is not None and down is not None:
            self._experts = self._kernels.quantized_experts(gate_up, down, self._number, variant)
        if self._experts is None:
            dense = [matrix.dense().unflatten(0, (self._number, -1)) for matrix in (self._gate_up, self._down)]
            self._experts = self._kernels.experts(dense[0], dense[1], variant)
        self._gate_up.release()
        self._down.release()
