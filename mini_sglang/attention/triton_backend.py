"""The `triton` attention backend: paged decode and prefill kernels over one KV pool; it needs no further package.

Rows that compute one token go to the decode kernel, rows that compute more to the prefill kernel; a mixed step launches
both over the same query and output tensors. In deterministic mode the decode kernel, without splits, computes all rows,
so that a token's bits depend only on what it sees. Knows no model and no request.
"""

from __future__ import annotations

import itertools
import sys
from dataclasses import replace

import torch

from mini_sglang.attention.base import AttentionMetadata
from mini_sglang.attention.kv_pool import KVPool, send
from mini_sglang.kernels.interface import KVCells
from mini_sglang.kernels.triton.paged_decode import PagedDecode, decode_tuning
from mini_sglang.kernels.triton.paged_prefill import (
    SHORT_PREFILL,
    PrefillTuning,
    paged_prefill,
    prefill_tiles,
    prefill_tuning,
    short_prefill_tuning,
)


class TritonBackend:
    """Plans over `pool`. Plans share one decode workspace, so a plan is valid until the next one is made."""

    def __init__(
        self,
        pool: KVPool,
        *,
        num_heads: int,
        dtype: torch.dtype,
        max_rows: int,
        deterministic: bool = False,
        window: int | None = None,
    ) -> None:
        """`dtype` is that of queries, `max_rows` the most rows of a step.

        With `deterministic` a token has the same bits decoded beside any other rows and as part of any chunk. With
        `window` a token sees the last `window` positions only, its own included.
        """
        self.pool = pool
        self.window = window
        self._deterministic = deterministic
        tuning = decode_tuning(pool.head_dim, dtype)
        self.group = num_heads // pool.num_kv_heads
        device = pool.layers[0].device
        if deterministic:  # the decode kernel's tiles
            tuning = replace(tuning, max_splits=1)
            self._long = self._short = PrefillTuning(block_queries=16)
        else:
            self._long = prefill_tuning(pool.head_dim, pool.page_size, dtype, device, pool.dtype)
            self._short = short_prefill_tuning(self._long, pool.head_dim, dtype)
        self.short_context = SHORT_PREFILL if self._short != self._long else sys.maxsize
        self._each_row = torch.arange(max_rows, dtype=torch.int32, device=device)
        self.decode = PagedDecode(
            max_rows=max_rows,
            num_heads=num_heads,
            num_kv_heads=pool.num_kv_heads,
            head_dim=pool.head_dim,
            page_size=pool.page_size,
            device=device,
            tuning=tuning,
            window=window,
        )

    def plan(self, metadata: AttentionMetadata) -> TritonPlan | TritonDecodePlan:
        starts, counts, device = metadata.starts, metadata.counts, metadata.cells.device
        chunks = self._chunks(counts)
        lengths = [0 if chunk else start + 1 for start, chunk in zip(starts, chunks, strict=True)]
        q_starts = [0, *itertools.accumulate(counts)][:-1]
        # one transfer for all of it
        rows = send([lengths, starts, chunks, q_starts], device, torch.int32)
        longest = max((start + chunk for start, chunk in zip(starts, chunks, strict=True) if chunk), default=0)
        tuning = self._short if longest <= self.short_context else self._long
        tiles = prefill_tiles(starts, chunks, self.group, tuning)
        if self._deterministic:
            self.decode.plan_tiles(rows[1], rows[2], rows[3], send(tiles, device, torch.int64))
            return TritonDecodePlan(self, metadata.page_table, metadata.cells)
        decodes = any(lengths)
        if decodes:
            self.decode.plan(rows[0], rows[3])
        return TritonPlan(
            self,
            metadata.page_table,
            metadata.cells,
            rows[1],
            rows[2],
            rows[3],
            send(tiles, device) if tiles else None,
            tuning,
            decodes=decodes,
        )

    def plan_decode(self, page_table: torch.Tensor, cells: torch.Tensor, lengths: torch.Tensor) -> TritonDecodePlan:
        self.decode.plan(lengths, self._each_row[: len(lengths)])
        return TritonDecodePlan(self, page_table, cells)

    def plan_prefill(
        self,
        page_table: torch.Tensor,
        cells: torch.Tensor,
        starts: torch.Tensor,
        counts: torch.Tensor,
        tiles: torch.Tensor,
        *,
        long: bool = False,
    ) -> TritonPlan | TritonDecodePlan:
        counts = torch.cat((counts[:-1], torch.zeros_like(counts[:1])))
        q_starts = (counts.cumsum(0) - counts).int()
        if self._deterministic:
            self.decode.plan_tiles(starts.int(), counts.int(), q_starts, tiles)
            return TritonDecodePlan(self, page_table, cells)
        lengths = torch.where(counts == 1, starts + 1, 0).int()
        self.decode.plan(lengths[:-1], q_starts[:-1])
        chunks = torch.where(counts > 1, counts, 0).int()
        return TritonPlan(
            self, page_table, cells, starts.int(), chunks, q_starts, tiles, self._tuning(long), decodes=True
        )

    def max_prefill_tiles(self, rows: int, tokens: int, *, long: bool = False) -> int:
        return tokens // (self._tuning(long).block_queries // self.group) + min(rows, tokens)

    def prefill_tiles(
        self, starts: list[int], counts: list[int], number: int, idle_row: int, *, long: bool = False
    ) -> list[int]:
        tiles = prefill_tiles(starts, self._chunks(counts), self.group, self._tuning(long))
        return tiles + [idle_row << 20] * (number - len(tiles))

    def _tuning(self, long: bool) -> PrefillTuning:
        return self._long if long else self._short

    def _chunks(self, counts: list[int]) -> list[int]:
        """Tokens of each row that are computed in tiles; single tokens are left to the splits of decode attention."""
        return [count if count > 1 or self._deterministic else 0 for count in counts]


class TritonDecodePlan:
    """A step that the decode kernel computes alone, and has planned."""

    def __init__(self, backend: TritonBackend, page_table: torch.Tensor, cells: torch.Tensor) -> None:
        self._backend = backend
        self._page_table, self._cells = page_table, cells

    def target(self, layer: int) -> KVCells:
        return self._backend.pool.cells(layer, self._cells)

    def attend(self, q: torch.Tensor, layer: int, sinks: torch.Tensor | None = None) -> torch.Tensor:
        pool = self._backend.pool
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        self._backend.decode.run(q, pool.key_cells[layer], pool.value_cells[layer], self._page_table, out, sinks)
        return out


class TritonPlan:
    """One step: the decode kernel has planned the rows that decode; `tiles` are those of the other rows."""

    def __init__(
        self,
        backend: TritonBackend,
        page_table: torch.Tensor,
        cells: torch.Tensor,
        starts: torch.Tensor,
        chunks: torch.Tensor,
        q_starts: torch.Tensor,
        tiles: torch.Tensor | None,
        tuning: PrefillTuning,
        *,
        decodes: bool,
    ) -> None:
        self._backend = backend
        self._page_table, self._cells = page_table, cells
        self._starts, self._chunks, self._q_starts = starts, chunks, q_starts
        self._tiles, self._tuning = tiles, tuning
        self._decodes = decodes

    def target(self, layer: int) -> KVCells:
        return self._backend.pool.cells(layer, self._cells)

    def attend(self, q: torch.Tensor, layer: int, sinks: torch.Tensor | None = None) -> torch.Tensor:
        """Attend q [T, heads, head_dim] to what the pool holds, the step's own tokens included -> the same shape"""
        pool = self._backend.pool
        keys, values = pool.key_cells[layer], pool.value_cells[layer]
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if self._decodes:
            self._backend.decode.run(q, keys, values, self._page_table, out, sinks)
        if self._tiles is not None:
            paged_prefill(
                q,
                keys,
                values,
                self._page_table,
                self._starts,
                self._chunks,
                self._q_starts,
                self._tiles,
                out,
                page_size=pool.page_size,
                tuning=self._tuning,
                window=self._backend.window,
                sinks=sinks,
            )
        return out
