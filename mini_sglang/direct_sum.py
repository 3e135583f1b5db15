"""Sums over the GPUs of one node by kernels that read the other GPUs' memory: torch's symmetric memory.

NCCL moves much data fast, and needs tens of microseconds for the little that a decode step sums. Here one kernel does
it: one shot, where each GPU reads all of the others' tensors; or for more data two shots, where each sums one part and
reads the others' sums. Both add in the order of the ranks, so all get the same bits. Multicast is not used. Everything
lies in CUDA graphs: the buffer is allocated once. A lost rank leaves the others waiting, until their process ends.
"""

from __future__ import annotations

import torch
import torch.distributed._symmetric_memory as symmetric_memory

_ONE_SHOT_BYTES = 256 << 10
_TWO_SHOT_BYTES = 4 << 20
_TWO_SHOT_SIZES = (2, 4, 8)  # what its kernel is made for
_ALIGNMENT = 16  # bytes that a thread reads at once
DTYPES = (torch.float32, torch.bfloat16)


class DirectSum:
    """Sums tensors of `dtype` over the `size` ranks of the process group `group`, registered by name, in any step."""

    def __init__(self, group: str, size: int, device: torch.device, dtype: torch.dtype) -> None:
        """All ranks make theirs at the same time. Raises RuntimeError where GPUs cannot read each other's memory."""
        self._group = group
        self._max_bytes = _TWO_SHOT_BYTES if size in _TWO_SHOT_SIZES else _ONE_SHOT_BYTES
        self._buffer = symmetric_memory.empty(self._max_bytes // dtype.itemsize, dtype=dtype, device=device)
        symmetric_memory.rendezvous(self._buffer, group)  # type: ignore[arg-type]  # takes a name

    def takes(self, x: torch.Tensor) -> bool:
        """Whether x is small and suits the kernels."""
        fits = x.nbytes <= self._max_bytes and x.dtype == self._buffer.dtype and x.is_contiguous()
        return fits and not x.nbytes % _ALIGNMENT and not x.storage_offset() * x.dtype.itemsize % _ALIGNMENT

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' x, in new memory or in that of x."""
        buffer = self._buffer[: x.numel()].view(x.shape)
        if x.nbytes <= _ONE_SHOT_BYTES:  # it fills the buffer itself
            total: torch.Tensor = torch.ops.symm_mem.one_shot_all_reduce_copy(buffer, x, "sum", self._group)
            return total
        buffer.copy_(x)
        torch.ops.symm_mem.two_shot_all_reduce_out(buffer, "sum", self._group, x)
        return x

    @staticmethod
    def is_possible(dtype: torch.dtype, devices: int) -> bool:
        """Whether the first `devices` GPUs of this node can read each other's memory, and the kernels sum `dtype`."""
        pairs = ((one, other) for one in range(devices) for other in range(devices) if one != other)
        return dtype in DTYPES and all(torch.cuda.can_device_access_peer(*pair) for pair in pairs)
