"""Root-mean-square normalisation (Zhang and Sennrich, arXiv 1910.07467)."""

from __future__ import annotations

import torch

from mini_sglang.kernels.interface import Norm
from mini_sglang.layers.placement import Placement
from mini_sglang.weights.tensor import CheckpointTensor, WeightSlot


class RMSNorm:
    """y = x / rms(x) * weight over the last dimension, computed in float32, by the product that reads y."""

    def __init__(self, size: int, eps: float, placement: Placement) -> None:
        self.weight = torch.empty(size, dtype=placement.dtype, device=placement.device)
        self.eps = eps

    @property
    def parameters(self) -> Norm:
        return Norm(self.weight, self.eps)

    def weight_slot(self) -> WeightSlot:
        def load(tensor: CheckpointTensor) -> None:
            self.weight.copy_(tensor.dense())

        return WeightSlot(tuple(self.weight.shape), load)
