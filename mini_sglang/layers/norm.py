"""Root-mean-square normalisation (Zhang and Sennrich, arXiv 1910.07467), and where a block has its norms.

y = x / rms(x) * weight over the last dimension, in float32. A norm is computed on its own, inside the matmul that
reads y, or in the kernel that adds up x, whichever costs least. So the layers around it are told of it once, when the
model is built.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mini_sglang.kernels.interface import Norm
from mini_sglang.layers.placement import Placement
from mini_sglang.weights.tensor import CheckpointTensor, WeightSlot


class RMSNorm:
    """The weight of one norm; `parameters` are what kernels are given."""

    def __init__(self, size: int, eps: float, placement: Placement) -> None:
        self.weight = torch.empty(size, dtype=placement.dtype, device=placement.device)
        self.eps = eps
        self.parameters = Norm(self.weight, eps)

    def weight_slot(self) -> WeightSlot:
        def load(tensor: CheckpointTensor) -> None:
            self.weight.copy_(tensor.dense())

        return WeightSlot(tuple(self.weight.shape), load)


@dataclass(frozen=True)
class BlockNorms:
    """The norms around one part of a block: x + part(before(x)), or x + after(part(x))."""

    before: RMSNorm | None = None
    after: RMSNorm | None = None
    following: RMSNorm | None = None  # reads the sum next; None: no norm does


NO_NORMS = BlockNorms()
