"""Experts in PyTorch, of the matrices of any device: the definition of what every device computes."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import torch

from mini_sglang.kernels.interface import Clamp, Matrix


class TorchExperts:
    """`Experts` of any `Matrix`: two matrix products for each expert that a token chose.

    A token's experts are added up in the order of its ids, whatever other tokens there are. The host reads how many
    tokens each expert has, so this cannot be captured in a CUDA graph.
    """

    def __init__(self, gate_up: Sequence[Matrix], down: Sequence[Matrix], clamp: Clamp | None) -> None:
        self._gate_up, self._down = gate_up, down  # one of each for each expert
        self._clamp = clamp

    def add_to(self, residual: torch.Tensor, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        flat, per_token = ids.flatten(), ids.shape[1]
        outputs = x.new_empty(len(flat), x.shape[1])
        by_expert = flat.argsort(stable=True).split(flat.bincount(minlength=len(self._down)).tolist())
        for gate_up, down, places in zip(self._gate_up, self._down, by_expert, strict=True):
            if len(places):  # indices into `flat` where tokens chose this expert
                outputs[places] = down.matmul(self._gated(gate_up, x[places // per_token]))
        combined = (outputs.view(*ids.shape, x.shape[1]) * weights.unsqueeze(-1)).sum(1)  # float32
        return residual + combined.to(residual.dtype)

    def _gated(self, gate_up: Matrix, x: torch.Tensor) -> torch.Tensor:
        if self._clamp is None:
            return gate_up.gated(x, None)
        alpha, limit = self._clamp
        gate, up = gate_up.matmul(x).chunk(2, -1)
        gate = gate.clamp(max=limit)
        return gate * torch.sigmoid(alpha * gate) * (up.clamp(-limit, limit) + 1)


def each_bias(biases: torch.Tensor | None) -> Iterable[torch.Tensor | None]:
    """The bias of each expert; without end where there is none."""
    return itertools.repeat(None) if biases is None else biases
