"""All-reduce over the GPUs of one node by kernels that access the other GPUs' memory: torch's symmetric memory.

NCCL moves much data fast, but needs tens of microseconds for the little that a decode step sums. Here one kernel does
it: each GPU sends its tensor to all others and adds up what it is sent (`kernels/triton/one_shot_all_reduce.py`). For
more data between more than two GPUs it is torch's two-shot kernel, where each GPU sums one part and reads the others'
sums. Both add in the order of the ranks, so all ranks get the same bits. Multicast is not used. CUDA graphs can capture
all of it, since the buffers are allocated once. A lost rank leaves the others waiting, until their process ends.
"""

from __future__ import annotations

import re
from typing import Any

import torch
import torch._C._distributed_c10d as _c10d
import torch.distributed._symmetric_memory as symmetric_memory

_ONE_SHOT_BYTES = 256 << 10  # two GPUs sum everything in one shot: no way sends less
_MAX_BYTES = 4 << 20
_TWO_SHOT_SIZES = (4, 8)  # numbers of ranks, of those that torch's kernel is made for
_ALIGNMENT = 16  # bytes that a thread reads at once
DTYPES = (torch.float32, torch.bfloat16)


class SymmMemAllReduce:
    """Sums tensors of `dtype` over all ranks, in any step."""

    def __init__(self, store: Any, nccl: Any, name: str, device: torch.device, dtype: torch.dtype) -> None:
        """Join the ranks of `nccl`, a process group, through `store`; all ranks call this at the same time.

        `name` is the same on all ranks, and new. Raises RuntimeError if GPUs cannot access each other's memory.
        """
        from mini_sglang.kernels.triton.one_shot_all_reduce import one_shot_all_reduce  # Triton, where there are GPUs

        rank, size = nccl.rank(), nccl.size()
        self._store = RenumberedStore(store)
        group: Any = _c10d.ProcessGroup(self._store, rank, size)  # by whose name symmetric memory finds the other ranks
        group._set_default_backend(_c10d.ProcessGroup.BackendType.NCCL)
        group._register_backend(device, _c10d.ProcessGroup.BackendType.NCCL, nccl)
        group._set_group_name(name)
        _c10d._register_process_group(name, group)  # type: ignore[arg-type]  # takes a name
        self._group, self._rank, self._dtype, self._one_shot_all_reduce = name, rank, dtype, one_shot_all_reduce
        self.one_shot_bytes = _MAX_BYTES if size == 2 else _ONE_SHOT_BYTES
        self.max_bytes = _MAX_BYTES if size == 2 or size in _TWO_SHOT_SIZES else _ONE_SHOT_BYTES
        self._inbox = symmetric_memory.empty(2, size, self.one_shot_bytes // 4, dtype=torch.int64, device=device)
        self._inbox.zero_()
        handle = symmetric_memory.rendezvous(self._inbox, name)  # type: ignore[arg-type]  # takes a name
        self._inboxes = torch.tensor(handle.buffer_ptrs, dtype=torch.int64, device=device)
        self._count = torch.zeros(2, dtype=torch.int32, device=device)
        torch.cuda.synchronize(device)
        handle.barrier()  # no rank writes into an inbox that is not cleared yet
        self._two_shot: torch.Tensor | None = None
        if self.max_bytes > self.one_shot_bytes:
            self._two_shot = symmetric_memory.empty(self.max_bytes // dtype.itemsize, dtype=dtype, device=device)
            symmetric_memory.rendezvous(self._two_shot, name)  # type: ignore[arg-type]

    def supports(self, x: torch.Tensor) -> bool:
        """Whether x is small and suits the kernels."""
        fits = x.nbytes <= self.max_bytes and x.dtype == self._dtype and x.is_contiguous()
        return fits and not x.nbytes % _ALIGNMENT and not x.storage_offset() * x.dtype.itemsize % _ALIGNMENT

    def all_reduce(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Replace x by the sum over all ranks plus `residual`, which is like x, and the same on all ranks."""
        if self._two_shot is None or x.nbytes <= self.one_shot_bytes:
            self._one_shot_all_reduce(x, self._inbox, self._inboxes, self._count, self._rank, residual)
            return x
        buffer = self._two_shot[: x.numel()].view(x.shape)
        buffer.copy_(x)
        torch.ops.symm_mem.two_shot_all_reduce_out(buffer, "sum", self._group, x)
        return x if residual is None else x.add_(residual)

    @staticmethod
    def is_available(dtype: torch.dtype, devices: int) -> bool:
        """Whether the first `devices` GPUs of this node can access each other's memory, and the kernels sum `dtype`."""
        pairs = ((one, other) for one in range(devices) for other in range(devices) if one != other)
        return dtype in DTYPES and all(torch.cuda.can_device_access_peer(*pair) for pair in pairs)


class RenumberedStore(_c10d.Store):
    """A store for the ranks of one engine, whose exchanges are numbered from zero.

    torch's symmetric memory numbers exchanges by process. The first rank's process may have had other engines before,
    the others' processes are new: each would wait for what the other has written under another number.
    """

    def __init__(self, store: Any) -> None:
        super().__init__()
        self._store = store
        self._numbers: dict[str, int] = {}  # torch's number -> ours

    def _key(self, key: str) -> str:
        return re.sub(r"(?<=SymmetricMemory/)\d+", self._number, key)

    def _number(self, found: re.Match[str]) -> str:
        return str(self._numbers.setdefault(found[0], len(self._numbers)))

    def set(self, key: str, value: Any) -> None:
        self._store.set(self._key(key), value)

    def get(self, key: str) -> bytes:
        return bytes(self._store.get(self._key(key)))

    def add(self, key: str, value: int) -> int:
        return int(self._store.add(self._key(key), value))

    def wait(self, keys: list[str], *timeout: Any) -> None:
        self._store.wait([self._key(key) for key in keys], *timeout)
