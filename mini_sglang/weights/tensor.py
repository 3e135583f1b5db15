"""How a tensor of a checkpoint reaches its place in the model: one at a time, dense or in its quantised blocks.

The readers of formats make `CheckpointTensor`s, layers make `WeightSlot`s; this module knows neither.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class QuantizedBlocks:
    """A 4-bit matrix as stored: w[o, i] = scale[o, i // group_size] * q[o, i] + minimum[o, i // group_size]."""

    q: torch.Tensor  # [out, in] uint8, values 0 to 15
    scale: torch.Tensor  # [out, in // group_size] float32
    minimum: torch.Tensor  # [out, in // group_size] float32
    group_size: int  # 32 for Q4_0 and Q4_1


@dataclass(frozen=True)
class CheckpointTensor:
    """One tensor of a checkpoint, under its Hugging Face name and in Hugging Face's row order.

    Nothing is read before `dense` or `blocks` is called. `dense` gives the values of `shape` in the dtype stored
    (safetensors; maybe a view of the mapped file: copy what is kept) or as float32 (dequantised GGUF); `blocks` the
    4-bit blocks if the tensor is stored in Q4_0 or Q4_1, else None.
    """

    name: str
    shape: tuple[int, ...]
    dense: Callable[[], torch.Tensor]
    blocks: Callable[[], QuantizedBlocks | None] = lambda: None
    dtype: str = "F32"  # of `dense`, as safetensors calls it: "BF16", "F8_E4M3", "I32", …


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
