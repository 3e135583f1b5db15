"""How a tensor of a checkpoint reaches its place in the model: one at a time, dense or as it is quantised.

The readers of formats make `CheckpointTensor`s, layers make `WeightSlot`s; this module knows neither.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from mini_sglang.parallel.sharding import Shard, copy_shard, whole
from mini_sglang.weights.quantized_weight import QuantizedWeight


@dataclass(frozen=True)
class CheckpointTensor:
    """One tensor of a checkpoint, under its Hugging Face name and in Hugging Face's row order.

    Nothing is read before `dense` or `quantized` is called. `dense` gives the values of `shape` in the dtype stored
    (safetensors; maybe a view of the mapped file: copy what is kept) or as float32 (dequantised); `quantized` gives
    them as they are stored, or None if they are not quantised, or in a way that `QuantizedWeight` cannot hold.
    """

    name: str
    shape: tuple[int, ...]
    dense: Callable[[], torch.Tensor]
    quantized: Callable[[], QuantizedWeight | None] = lambda: None
    dtype: str = "F32"  # of `dense`, as safetensors calls it: "BF16", "F8_E4M3", "I32", …
    chunks: Callable[[int, int], Iterator[torch.Tensor]] | None = None  # of these rows of `dense`, if it is computed

    def copy_to(self, target: torch.Tensor, *shards: Shard) -> None:
        """Fill `target` as `copy_shard` does. What has to be computed is, for this part alone, a few rows at a time."""
        if self.chunks is None:
            copy_shard(target, self.dense(), *shards)
            return
        rows, *others = shards
        end = 0
        for chunk in self.chunks(rows.start, rows.stop):
            start, end = end, end + len(chunk)
            copy_shard(target[start:end], chunk, whole(len(chunk)), *others)
        target[end:].zero_()


@dataclass(frozen=True)
class WeightSlot:
    """A place in the model that one checkpoint tensor fills."""

    shape: tuple[int, ...]  # expected of the tensor in the checkpoint
    load: Callable[[CheckpointTensor], None]


class WeightsError(ValueError):
    """The tensors of a checkpoint do not fit the model or cannot be read; the message lists them."""


def listed(names: list[str], most: int = 5) -> str:
    """The first `most` names, and how many more there are."""
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest
