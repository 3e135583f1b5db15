"""Root-mean-square normalisation (Zhang and Sennrich, arXiv 1910.07467)."""

from __future__ import annotations

from collections.abc import Callable

import torch

from mini_sglang.kernels.base import Norm
from mini_sglang.layers.placement import Placement
from mini_sglang.weights.tensor import CheckpointTensor, WeightSlot


class RMSNorm:
    """y = x / rms(x) * weight over the last dimension, computed in float32, by the product that reads y.

    With `fold` (a `Linear.fold_norm`) that product takes the weight in once it is loaded.
    """

    def __init__(
        self, size: int, eps: float, placement: Placement, fold: Callable[[torch.Tensor], None] | None = None
    ) -> None:
        self.weight = torch.empty(size, dtype=placement.dtype, device=placement.device)
        self.eps = eps
        self._fold = fold

    @property
    def parameters(self) -> Norm:
        return Norm(self.weight if self._fold is None else None, self.eps)

    def weight_slot(self) -> WeightSlot:
        def load(tensor: CheckpointTensor) -> None:
            self.weight.copy_(tensor.dense())
            if self._fold is not None:
                self._fold(self.weight)

        return WeightSlot(tuple(self.weight.shape), load)
