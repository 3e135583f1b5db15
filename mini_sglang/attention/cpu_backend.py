"""Attention on a CPU: decode steps of few rows read the pages in place, in one compiled kernel.

Gathering every row's pages into one padded tensor, as the reference does, moves more bytes than attending to them.
Steps with prompt chunks or many rows go to the reference.
"""

from __future__ import annotations

import torch

from mini_sglang.attention.base import AttentionMetadata, AttentionPlan
from mini_sglang.attention.kv_pool import KVPool
from mini_sglang.attention.reference import ReferenceBackend
from mini_sglang.kernels.base import KVCells
from mini_sglang.kernels.cpu_kernels import MAX_ROWS, CpuKernels


class CpuBackend:
    """Over a float32 or bfloat16 pool."""

    def __init__(self, pool: KVPool, dtype: torch.dtype, kernels: CpuKernels, window: int | None = None) -> None:
        self._pool = pool
        self._kernels = kernels
        self._window = window
        self._reference = ReferenceBackend(pool, dtype, window)

    def plan(self, metadata: AttentionMetadata) -> AttentionPlan:
        if len(metadata.counts) <= MAX_ROWS and max(metadata.counts) == 1:
            return CpuDecodePlan(self._pool, metadata, self._kernels, self._window)
        return self._reference.plan(metadata)


class CpuDecodePlan:
    """A step in which every row computes one token."""

    def __init__(self, pool: KVPool, metadata: AttentionMetadata, kernels: CpuKernels, window: int | None) -> None:
        self._pool = pool
        self._kernels = kernels
        self._window = window
        self._cells = metadata.cells
        lengths = [start + 1 for start in metadata.starts]
        num_pages = -(-max(lengths) // pool.page_size)
        self._page_table = metadata.page_table[:, :num_pages].contiguous()
        self._lengths = torch.tensor(lengths)

    def target(self, layer: int) -> KVCells:
        return self._pool.cells(layer, self._cells)

    def attend(self, q: torch.Tensor, layer: int) -> torch.Tensor:
        keys, values = self._pool.key_cells[layer], self._pool.value_cells[layer]
        return self._kernels.attend(
            q.contiguous(), keys, values, self._page_table, self._lengths, self._pool.page_size, self._window
        )
