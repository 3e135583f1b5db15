"""Checkpoint tensors whose values are computed a few rows at a time, from whatever a format stores. Knows no format."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from mini_sglang.parallel.sharding import whole
from mini_sglang.weights.quantized_weight import QuantizedWeight
from mini_sglang.weights.tensor import CheckpointTensor


def computed_tensor(
    name: str,
    shape: tuple[int, ...],
    chunks: Callable[[int, int], Iterator[torch.Tensor]],
    quantized: Callable[[], QuantizedWeight | None],
) -> CheckpointTensor:
    """`chunks(start, stop)` gives the rows from start to stop in order, float32, some in each tensor."""

    def dense() -> torch.Tensor:
        values = torch.empty(shape)
        tensor.copy_to(values, *map(whole, shape))
        return values

    tensor = CheckpointTensor(name, shape, dense, quantized, chunks=chunks)
    return tensor
