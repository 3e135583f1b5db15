"""Attention on a CPU: rows that compute one token read the pages in place, in one compiled kernel.

The reference gathers every row's pages into one padded tensor, which moves more bytes than attending to them; it
computes the chunks of prompts here too. Knows no model and no request.
"""

from __future__ import annotations

from functools import partial

import torch

from mini_sglang.attention.base import AttentionMetadata, AttentionPlan
from mini_sglang.attention.kv_pool import KVPool
from mini_sglang.attention.reference import ReferencePlan
from mini_sglang.kernels.cpu.kernels import CpuKernels


class CpuBackend:
    """Plans over a float32 or bfloat16 pool."""

    def __init__(self, pool: KVPool, dtype: torch.dtype, kernels: CpuKernels, window: int | None = None) -> None:
        self._pool = pool
        self._dtype = dtype
        self._kernels = kernels
        self._window = window

    def plan(self, metadata: AttentionMetadata) -> AttentionPlan:
        decode = partial(CpuDecode, self._pool, metadata, self._kernels, self._window)
        return ReferencePlan(self._pool, metadata, self._dtype, self._window, decode)


class CpuDecode:
    """The attention of the `rows` of a step that compute one token each."""

    def __init__(
        self, pool: KVPool, metadata: AttentionMetadata, kernels: CpuKernels, window: int | None, rows: list[int]
    ) -> None:
        self._pool = pool
        self._kernels = kernels
        self._window = window
        lengths = [metadata.starts[row] + 1 for row in rows]
        num_pages = -(-max(lengths) // pool.page_size)
        table = metadata.page_table if len(rows) == len(metadata.counts) else metadata.page_table[rows]
        self._page_table = table[:, :num_pages].contiguous()
        self._lengths = torch.tensor(lengths)

    def run(self, q: torch.Tensor, layer: int) -> torch.Tensor:
        """q [rows, heads, head_dim] -> the same shape"""
        keys, values = self._pool.key_cells[layer], self._pool.value_cells[layer]
        return self._kernels.attend(
            q.contiguous(), keys, values, self._page_table, self._lengths, self._pool.page_size, self._window
        )
