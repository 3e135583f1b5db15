"""Paged attention in plain PyTorch, on any device: the definition that every other backend is tested against.

Rows that compute one token (decodes) are batched into one padded call; rows that compute a chunk run one by one. Query
heads that share a KV head are laid out as further query rows or as a broadcast batch, so the keys and values of a group
are never repeated in memory. On a CPU a compiled kernel may attend instead: it reads the pages in place, as gathering
them moves more bytes than attending to a decode's, and a token's result does not depend on the others of the step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from mini_sglang.attention.base import AttentionMetadata
from mini_sglang.attention.kv_pool import KVPool
from mini_sglang.kernels.interface import KVCells

if TYPE_CHECKING:  # it needs Numba
    from mini_sglang.kernels.cpu.kernels import CpuKernels

_ROWS_MULTIPLE = 64  # of queries and keys, where attention is compiled for their numbers


class ReferenceBackend:
    """Reads and writes `pool` with gathers and scatters of whole pages, or has `kernels` attend to the pages in place.

    With `window` a token sees the last `window` positions only, its own included.
    """

    def __init__(
        self, pool: KVPool, dtype: torch.dtype, window: int | None = None, kernels: CpuKernels | None = None
    ) -> None:
        self._pool = pool
        self._dtype = dtype
        self._window = window
        self._kernels = kernels

    def plan(self, metadata: AttentionMetadata) -> ReferencePlan:
        return ReferencePlan(self._pool, metadata, self._dtype, self._window, self._kernels)


class ReferencePlan:
    """One step: `decode` is the batch of single-token rows, `chunks` are the others."""

    def __init__(
        self,
        pool: KVPool,
        metadata: AttentionMetadata,
        dtype: torch.dtype,
        window: int | None,
        kernels: CpuKernels | None,
    ) -> None:
        self._pool = pool
        self._cells = metadata.cells
        self._compiled = None if kernels is None else _Compiled(pool, metadata, kernels, window)
        if self._compiled is not None:
            return
        device = metadata.page_table.device
        firsts = _exclusive_cumsum(metadata.counts)
        decode_rows = [row for row, count in enumerate(metadata.counts) if count == 1]
        self._chunks = [
            _Chunk(pool, metadata, row, firsts[row], dtype, window)
            for row, count in enumerate(metadata.counts)
            if count > 1
        ]
        self._decode = _Decode(pool, metadata, decode_rows, dtype, window) if decode_rows else None
        # None: every token is a decode row, in order, so no gather is needed
        self._decode_tokens = (
            torch.tensor([firsts[row] for row in decode_rows], device=device) if self._chunks and decode_rows else None
        )

    def target(self, layer: int) -> KVCells:
        return self._pool.cells(layer, self._cells)

    def attend(self, q: torch.Tensor, layer: int, sinks: torch.Tensor | None = None) -> torch.Tensor:
        if self._compiled is not None:
            return self._compiled.run(q, layer, sinks)
        if self._decode is not None and not self._chunks:
            return self._decode.run(q, layer, sinks)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for chunk in self._chunks:
            out[chunk.tokens] = chunk.run(q[chunk.tokens], layer, sinks)
        if self._decode is not None:
            out[self._decode_tokens] = self._decode.run(q[self._decode_tokens], layer, sinks)
        return out


class _Decode:
    """Rows of one query token each, padded to the longest row's pages and masked beyond each row's own length."""

    def __init__(
        self, pool: KVPool, metadata: AttentionMetadata, rows: list[int], dtype: torch.dtype, window: int | None
    ) -> None:
        self._pool = pool
        device = metadata.page_table.device
        lengths, page_table = _lengths_and_pages(pool, metadata, rows)
        self._pages = page_table.reshape(-1)
        width = page_table.shape[1] * pool.page_size
        self._kv_shape = (2, len(rows), width, pool.num_kv_heads, pool.head_dim)
        # the query heads of a group are the query rows of their KV head
        self._q_shape = (len(rows), pool.num_kv_heads, -1, pool.head_dim)
        own = torch.tensor(lengths, device=device).unsqueeze(1) - 1
        masked = _masked(torch.arange(width, device=device), own, window)
        self._mask = _additive_mask(masked, dtype).view(len(rows), 1, 1, width)

    def run(self, q: torch.Tensor, layer: int, sinks: torch.Tensor | None) -> torch.Tensor:
        """q [rows, heads, head_dim] -> the same shape"""
        k, v = self._pool.gather(layer, self._pages).to(q.dtype).view(self._kv_shape).transpose(2, 3).unbind()
        mask = self._mask
        if sinks is not None:
            k, v, mask = _with_sinks(k, v, mask, sinks.view(self._pool.num_kv_heads, -1, 1))
        return F.scaled_dot_product_attention(q.reshape(self._q_shape), k, v, attn_mask=mask).reshape(q.shape)


class _Compiled:
    """All rows in a kernel that reads the pages in place, and computes a token alike in every step."""

    def __init__(self, pool: KVPool, metadata: AttentionMetadata, kernels: CpuKernels, window: int | None) -> None:
        self._pool, self._kernels, self._window = pool, kernels, window
        starts, counts, most = metadata.starts, metadata.counts, kernels.max_queries
        firsts = _exclusive_cumsum(counts)
        pieces = [(row, done) for row in range(len(counts)) for done in range(0, counts[row], most)]
        blocks = [(row, firsts[row] + done, min(most, counts[row] - done), starts[row] + done) for row, done in pieces]
        self._blocks = torch.tensor(blocks)
        length = max(start + count for start, count in zip(starts, counts, strict=True))
        self._page_table = metadata.page_table[:, : -(-length // pool.page_size)].contiguous()

    def run(self, q: torch.Tensor, layer: int, sinks: torch.Tensor | None) -> torch.Tensor:
        """q [T, heads, head_dim] -> the same shape"""
        keys, values = self._pool.key_cells[layer], self._pool.value_cells[layer]
        return self._kernels.attend(
            q.contiguous(), keys, values, self._page_table, self._blocks, self._pool.page_size, self._window, sinks
        )


def _lengths_and_pages(pool: KVPool, metadata: AttentionMetadata, rows: list[int]) -> tuple[list[int], torch.Tensor]:
    """How many tokens each of these rows sees, its own included, and the pages of them [rows, pages of the longest]"""
    lengths = [metadata.starts[row] + 1 for row in rows]
    table = metadata.page_table if len(rows) == len(metadata.counts) else metadata.page_table[rows]
    return lengths, table[:, : -(-max(lengths) // pool.page_size)]


class _Chunk:
    """One row that computes several tokens: `tokens` is its span in the step."""

    def __init__(
        self,
        pool: KVPool,
        metadata: AttentionMetadata,
        row: int,
        first: int,
        dtype: torch.dtype,
        window: int | None,
    ) -> None:
        self._pool = pool
        start, count = metadata.starts[row], metadata.counts[row]
        self.tokens = slice(first, first + count)
        self._length = start + count
        self._pages = metadata.page_table[row, : -(-self._length // pool.page_size)]
        self._mask: torch.Tensor | None = None
        if start > 0 or (window is not None and window < count):  # else the kernel's own causal mask is the same
            positions = torch.arange(self._length, device=self._pages.device)
            self._mask = _additive_mask(_masked(positions, positions[start:].unsqueeze(1), window), dtype)

    def run(self, q: torch.Tensor, layer: int, sinks: torch.Tensor | None) -> torch.Tensor:
        """q [count, heads, head_dim] -> the same shape"""
        kv_heads = self._pool.num_kv_heads
        group = q.shape[1] // kv_heads
        kv = self._pool.gather(layer, self._pages)[:, : self._length].to(q.dtype).transpose(1, 2)
        k, v = kv.unsqueeze(2).expand(-1, -1, group, -1, -1).unbind()  # [kv_heads, group, length, head_dim] each
        grouped = q.unflatten(1, (kv_heads, group)).permute(1, 2, 0, 3)  # [kv_heads, group, count, head_dim]
        mask = self._mask
        if sinks is not None:
            if mask is None:
                positions = torch.arange(self._length, device=q.device)
                mask = _additive_mask(_masked(positions, positions.unsqueeze(1), None), q.dtype)
            k, v, mask = _with_sinks(k, v, mask, sinks.view(kv_heads, -1, 1, 1))
        out = _attend(grouped, k, v, mask)
        return out.permute(2, 0, 1, 3).flatten(1, 2)


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Attention of q [kv_heads, group, count, head_dim] to k and v [kv_heads, group, length, head_dim] -> as q

    k and v are the same for a group's heads. Without `mask` [count, length] it is causal, and count = length.
    """
    count, length = q.shape[2], k.shape[2]
    if q.dtype == torch.bfloat16 and q.device.type == "cpu":
        # PyTorch compiles products of bfloat16 for each shape and, in each thread, keeps them for ever
        group = k.shape[1]
        more_queries, more_keys = -count % _ROWS_MULTIPLE, -length % _ROWS_MULTIPLE
        q = F.pad(q, (0, 0, 0, more_queries))
        k, v = (F.pad(x[:, :1], (0, 0, 0, more_keys)).expand(-1, group, -1, -1) for x in (k, v))
        if mask is not None:
            mask = F.pad(F.pad(mask, (0, more_keys), value=float("-inf")), (0, 0, 0, more_queries))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)[:, :, :count]


def _with_sinks(
    k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, sinks: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One more key and value, of zeros, whose score is the head's sink: it takes its share, and adds nothing.

    k and v [..., length, head_dim]; mask [..., queries, length] and sinks [..., 1] fit those of the scores.
    """
    shape = torch.broadcast_shapes((*mask.shape[:-1], 1), sinks.shape)
    mask = torch.cat((mask.expand(*shape[:-1], mask.shape[-1]), sinks.to(mask.dtype).expand(shape)), -1)
    return F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1)), mask


def _masked(positions: torch.Tensor, own: torch.Tensor, window: int | None) -> torch.Tensor:
    """Which `positions` [n] the queries at positions `own` [queries, 1] do not see -> [queries, n] bool"""
    later = positions > own
    return later if window is None else later | (positions <= own - window)


def _additive_mask(masked: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """0 where a key is seen, -inf where it is masked"""
    return torch.zeros(masked.shape, dtype=dtype, device=masked.device).masked_fill_(masked, float("-inf"))


def _exclusive_cumsum(counts: list[int]) -> list[int]:
    firsts, total = [], 0
    for count in counts:
        firsts.append(total)
        total += count
    return firsts
