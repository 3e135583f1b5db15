"""The optional `flashinfer` attention backend: FlashInfer's paged kernels (Ye et al., arXiv 2501.01005) over our pool.

Steps of one token per row go to its decode wrapper, all others to its prefill wrapper, which takes rows of one token
too. Both plan on the host, from the lengths, so CUDA graphs can capture neither. No other module knows FlashInfer.
"""

from __future__ import annotations

from typing import Any

import flashinfer
import torch
import torch.nn.functional as F

from mini_sglang.attention.base import AttentionMetadata
from mini_sglang.attention.kv_pool import KVPool
from mini_sglang.kernels.interface import KVCells

_HEAD_DIMS = (64, 128, 256)
_WORKSPACE_BYTES = 256 << 20  # for partial results of split rows; FlashInfer raises for a plan that needs more


class FlashInferBackend:
    """Plans over `pool`. Plans share the wrappers, so a plan is valid until the next one is made."""

    def __init__(self, pool: KVPool, *, num_heads: int, dtype: torch.dtype) -> None:
        """`dtype`, bfloat16 or float16, is that of queries. Raises ValueError for a head_dim that FlashInfer lacks."""
        if pool.head_dim not in _HEAD_DIMS:
            raise ValueError(
                f"attention_backend=flashinfer has no kernels for head_dim {pool.head_dim}, only for "
                f"{', '.join(map(str, _HEAD_DIMS))}; choose triton"
            )
        self._pool = pool
        self._sizes = (num_heads, pool.num_kv_heads, pool.head_dim, pool.page_size)
        self._dtypes = {"q_data_type": dtype, "kv_data_type": pool.dtype}
        self._device = pool.layers[0].device
        workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=self._device)
        # on tensor cores any number of query heads may share a KV head
        self._decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
        self._prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
        self._planned = torch.cuda.Event()

    def plan(self, metadata: AttentionMetadata) -> FlashInferPlan:
        starts, counts = torch.tensor([metadata.starts, metadata.counts], dtype=torch.int32)
        lengths = starts + counts
        pages = (lengths + self._pool.page_size - 1) // self._pool.page_size
        in_last_page = lengths - (pages - 1) * self._pool.page_size
        first_pages = _offsets(pages)
        row = torch.repeat_interleave(pages)
        place = torch.arange(len(row)) - first_pages[row] + row * metadata.page_table.shape[1]
        place = place.pin_memory().to(self._device, non_blocking=True)
        page_ids = metadata.page_table.flatten()[place].int()
        # the wrapper sends a plan through its pinned memory, which the previous step may not have read yet
        self._planned.synchronize()
        if max(metadata.counts) == 1:
            wrapper = self._decode
            wrapper.plan(first_pages, page_ids, in_last_page, *self._sizes, **self._dtypes)
        else:
            wrapper = self._prefill
            wrapper.plan(
                _offsets(counts), first_pages, page_ids, in_last_page, *self._sizes, causal=True, **self._dtypes
            )
        self._planned.record()
        return FlashInferPlan(self._pool, metadata.cells, wrapper)


class FlashInferPlan:
    """The attention of one step, planned in `wrapper`."""

    def __init__(self, pool: KVPool, cells: torch.Tensor, wrapper: Any) -> None:
        self._pool, self._cells, self._wrapper = pool, cells, wrapper

    def target(self, layer: int) -> KVCells:
        return self._pool.cells(layer, self._cells)

    def attend(self, q: torch.Tensor, layer: int, sinks: torch.Tensor | None = None) -> torch.Tensor:
        assert sinks is None, "select.py refuses models with sinks"
        keys, values = self._pool.layers[layer].unbind()
        attended: torch.Tensor = self._wrapper.run(q.contiguous(), (keys, values))
        return attended


def _offsets(counts: torch.Tensor) -> torch.Tensor:
    """The index where each of `counts` [n] begins, and the end -> [n + 1] int32"""
    return F.pad(counts.cumsum(0), (1, 0)).int()
