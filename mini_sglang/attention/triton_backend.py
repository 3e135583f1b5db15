"""The `triton` attention backend: paged decode and prefill kernels over one KV pool, nothing to install.

Rows that compute one token go to the decode kernel, rows that compute more to the prefill kernel; a mixed step launches
both over the same query and output tensors. Knows no model and no request.
"""

from __future__ import annotations

import itertools

import torch

from mini_sglang.attention.base import AttentionMetadata
from mini_sglang.attention.kv_pool import KVPool
from mini_sglang.kernels.base import KVCells
from mini_sglang.kernels.paged_decode import DecodeTuning, PagedDecode, decode_tuning, split_tokens_for
from mini_sglang.kernels.paged_prefill import PrefillTuning, paged_prefill, prefill_tiles, prefill_tuning


class TritonBackend:
    """Plans over `pool`; plans share one decode workspace, so a plan ends when the next one is made."""

    def __init__(
        self,
        pool: KVPool,
        *,
        num_heads: int,
        dtype: torch.dtype,
        max_rows: int,
        split_tokens: int | None = None,
        tuning: DecodeTuning | None = None,
    ) -> None:
        """`dtype` is that of queries, `max_rows` the most rows of a step.

        With `split_tokens` a decoded row's bits depend on that row alone; without, the number of rows decides.
        """
        self.pool = pool
        self._split_tokens = split_tokens
        self.group = num_heads // pool.num_kv_heads
        device = pool.layers[0].device
        self.prefill_tuning = prefill_tuning(pool.head_dim, pool.page_size, dtype, device)
        self.decode = PagedDecode(
            max_rows=max_rows,
            num_heads=num_heads,
            num_kv_heads=pool.num_kv_heads,
            head_dim=pool.head_dim,
            page_size=pool.page_size,
            device=device,
            tuning=tuning or decode_tuning(pool.head_dim, dtype),
        )

    def plan(self, metadata: AttentionMetadata) -> TritonPlan:
        return TritonPlan(self, metadata)

    def plan_decode(self, page_table: torch.Tensor, cells: torch.Tensor, lengths: torch.Tensor) -> TritonDecodePlan:
        """The plan of a step with one token per row, from device tensors alone, so that it can lie in a CUDA graph.

        page_table [R, pages], cells [R] int64, lengths [R] int32: tokens that each row sees, its own included.
        """
        tokens = torch.arange(len(lengths), dtype=torch.int32, device=lengths.device)
        self.decode.plan(lengths, tokens, split_tokens=self.split_tokens(len(lengths)))
        return TritonDecodePlan(self, page_table, cells)

    def split_tokens(self, rows: int) -> int:
        """Tokens per split of a step that decodes `rows` rows."""
        return self._split_tokens or split_tokens_for(rows, self.pool.num_kv_heads)


class TritonDecodePlan:
    """A step in which row r is token r, and every row computes one."""

    def __init__(self, backend: TritonBackend, page_table: torch.Tensor, cells: torch.Tensor) -> None:
        self._backend = backend
        self._page_table, self._cells = page_table, cells

    def target(self, layer: int) -> KVCells:
        return self._backend.pool.cells(layer, self._cells)

    def attend(self, q: torch.Tensor, layer: int) -> torch.Tensor:
        pool = self._backend.pool
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        self._backend.decode.run(q, pool.key_cells[layer], pool.value_cells[layer], self._page_table, out)
        return out


class TritonPlan:
    """One step: which rows decode, and the tiles of those that do not."""

    def __init__(self, backend: TritonBackend, metadata: AttentionMetadata) -> None:
        self._backend = backend
        self._page_table, self._cells = metadata.page_table, metadata.cells
        starts, counts = metadata.starts, metadata.counts
        lengths = [start + 1 if count == 1 else 0 for start, count in zip(starts, counts, strict=True)]
        chunks = [count if count > 1 else 0 for count in counts]
        firsts = [0, *itertools.accumulate(counts)][:-1]
        # one transfer for all of it
        rows = torch.tensor([lengths, starts, chunks, firsts], dtype=torch.int32).to(self._cells.device)
        self._lengths, self._starts, self._chunks, self._firsts = rows.unbind()
        self._tiles: torch.Tensor | None = None
        if any(chunks):
            tiles = prefill_tiles(starts, chunks, backend.group, self._prefill_tuning)
            self._tiles = torch.tensor(tiles, dtype=torch.int64).to(self._cells.device)
        decodes = sum(1 for length in lengths if length)
        self._decodes = decodes > 0
        if self._decodes:
            backend.decode.plan(self._lengths, self._firsts, split_tokens=backend.split_tokens(decodes))

    @property
    def _prefill_tuning(self) -> PrefillTuning:
        return self._backend.prefill_tuning

    def target(self, layer: int) -> KVCells:
        return self._backend.pool.cells(layer, self._cells)

    def attend(self, q: torch.Tensor, layer: int) -> torch.Tensor:
        """Attend q [T, heads, head_dim] to what the pool holds, the step's own tokens included -> the same shape"""
        pool = self._backend.pool
        keys, values = pool.key_cells[layer], pool.value_cells[layer]
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if self._decodes:
            self._backend.decode.run(q, keys, values, self._page_table, out)
        if self._tiles is not None:
            paged_prefill(
                q,
                keys,
                values,
                self._page_table,
                self._starts,
                self._chunks,
                self._firsts,
                self._tiles,
                out,
                page_size=pool.page_size,
                tuning=self._prefill_tuning,
            )
        return out
