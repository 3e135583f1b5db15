"""The optional `flash_attn` attention backend: the kernels of FlashAttention 3 if it is installed, else of 2.

Both read our pool through the page table, and lengths on the device, so decode steps can be captured in CUDA graphs
(Dao, arXiv 2307.08691; Shah et al., arXiv 2407.08608). No other module knows these packages.
"""

from __future__ import annotations

import importlib.util
import itertools
from dataclasses import dataclass

import torch

from mini_sglang.attention.base import AttentionMetadata
from mini_sglang.attention.kv_pool import KVPool, send
from mini_sglang.kernels.interface import KVCells

if _HAS_3 := importlib.util.find_spec("flash_attn_interface") is not None:
    from flash_attn_interface import flash_attn_with_kvcache
else:
    from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

_PAGE_TOKENS_2 = 256  # FlashAttention 2 takes pages of a multiple of this many tokens


class FlashAttnBackend:
    """Plans over a pool of the queries' dtype, bfloat16 or float16. Raises ValueError for pages that are too small."""

    def __init__(self, pool: KVPool) -> None:
        if not _HAS_3 and pool.page_size % _PAGE_TOKENS_2:
            raise ValueError(
                f"page_size must be a multiple of {_PAGE_TOKENS_2} for attention_backend=flash_attn with "
                f"FlashAttention 2, got {pool.page_size}; FlashAttention 3 (flash_attn_interface) takes any"
            )
        self._pool = pool

    def plan(self, metadata: AttentionMetadata) -> FlashAttnPlan:
        device = metadata.cells.device
        ends = [start + count for start, count in zip(metadata.starts, metadata.counts, strict=True)]
        lengths = send(ends, device, torch.int32)
        chunks = None
        if max(metadata.counts) > 1:
            offsets = [[0, *itertools.accumulate(counts)] for counts in (metadata.counts, ends)]
            cu_seqlens_q, cu_seqlens_k = send(offsets, device, torch.int32)
            chunks = _Chunks(cu_seqlens_q, cu_seqlens_k, max(metadata.counts), max(ends))
        return FlashAttnPlan(self._pool, metadata.page_table, metadata.cells, lengths, chunks)

    def plan_decode(self, page_table: torch.Tensor, cells: torch.Tensor, lengths: torch.Tensor) -> FlashAttnPlan:
        return FlashAttnPlan(self._pool, page_table, cells, lengths, None)


@dataclass(frozen=True)
class _Chunks:
    """What a step needs besides lengths if a row computes more than one token, by FlashAttention's names. R rows."""

    cu_seqlens_q: torch.Tensor  # [R + 1] int32: where each row's tokens begin among the step's, and the end
    cu_seqlens_k: torch.Tensor  # [R + 1] int32: the same for all tokens that the rows see
    max_seqlen_q: int
    max_seqlen_k: int


class FlashAttnPlan:
    """The attention of one step; without `chunks`, row r is token r."""

    def __init__(
        self,
        pool: KVPool,
        page_table: torch.Tensor,
        cells: torch.Tensor,
        lengths: torch.Tensor,
        chunks: _Chunks | None,
    ) -> None:
        self._pool, self._cells = pool, cells
        self._page_table, self._lengths = page_table.int(), lengths
        self._chunks = chunks

    def target(self, layer: int) -> KVCells:
        return self._pool.cells(layer, self._cells)

    def attend(self, q: torch.Tensor, layer: int, sinks: torch.Tensor | None = None) -> torch.Tensor:
        """Attend q [T, heads, head_dim] to what the pool holds, the step's own tokens included -> the same shape"""
        assert sinks is None, "select.py refuses models with sinks"
        keys, values = self._pool.layers[layer].unbind()
        table = {"page_table" if _HAS_3 else "block_table": self._page_table}
        chunks = self._chunks
        attended: torch.Tensor
        if chunks is None:
            attended = flash_attn_with_kvcache(
                q.unsqueeze(1), keys, values, cache_seqlens=self._lengths, causal=True, **table
            ).squeeze(1)
        elif _HAS_3:
            attended = flash_attn_with_kvcache(
                q,
                keys,
                values,
                cache_seqlens=self._lengths,
                cu_seqlens_q=chunks.cu_seqlens_q,
                max_seqlen_q=chunks.max_seqlen_q,
                causal=True,
                **table,
            )
        else:
            attended = flash_attn_varlen_func(
                q,
                keys,
                values,
                chunks.cu_seqlens_q,
                chunks.cu_seqlens_k,
                chunks.max_seqlen_q,
                chunks.max_seqlen_k,
                causal=True,
                **table,
            )
        return attended
