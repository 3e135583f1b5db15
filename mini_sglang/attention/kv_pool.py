"""The memory of keys and values of all layers, cut into pages. Who owns which page is not known here."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mini_sglang.attention.transfer import send
from mini_sglang.kernels.interface import KVCells, movable

_COPY_BYTES = 64 << 20  # that are on their way at once when pages are copied


class KVPool:
    """Per layer [2, num_pages, page_size, kv_heads, head_dim]: keys at index 0, values at 1 (NHD order).

    In float8_e4m3fn they are stored with scale 1: rounded to 3 bits of mantissa, and values beyond ±448 saturate.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (num_layers, 2, num_pages, page_size, num_kv_heads, head_dim)
        self._memory = torch.zeros(shape, dtype=dtype, device=device)
        self.layers = self._memory.unbind()
        self._movable = movable(self._memory).unbind()  # the layers as they can be read and written by index
        # as rows of one dimension: beyond 2 GB torch would cut a copy with more dimensions into one for each layer
        self._pages = movable(self._memory).flatten(0, 2)
        # [2 num_layers, 1]: which pages of all are page 0 of each layer's keys, and of its values
        self._first_pages = torch.arange(0, 2 * num_layers * num_pages, num_pages, device=device).unsqueeze(1)
        # the same memory by cell (page id * page_size + offset): [num_cells, kv_heads, head_dim] of keys and of values
        self.key_cells = [layer[0].flatten(0, 1) for layer in self.layers]
        self.value_cells = [layer[1].flatten(0, 1) for layer in self.layers]
        self.dtype = dtype
        self.page_size = page_size
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim

    def cells(self, layer: int, cells: torch.Tensor) -> KVCells:
        """`cells` [tokens] int64 of one layer, as a place to store to."""
        return KVCells(self.key_cells[layer], self.value_cells[layer], cells)

    def gather(self, layer: int, pages: torch.Tensor) -> torch.Tensor:
        """Keys and values of `pages` [n] in that order -> [2, n * page_size, kv_heads, head_dim] of the pool's dtype"""
        return self._movable[layer].index_select(1, pages).view(self.dtype).flatten(1, 2)

    @staticmethod
    def bytes_per_page(num_layers: int, page_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        return 2 * num_layers * page_size * num_kv_heads * head_dim * dtype.itemsize

    def copy_pages(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy whole pages, (source, destination) each; every source is read before any destination is written."""
        if not copies:
            return
        sources, destinations = send([*zip(*copies, strict=True)], self._memory.device)
        pages = self._pages
        bytes_at_once = len(copies) * pages[0].nbytes
        for firsts in self._first_pages.split(max(1, _COPY_BYTES // bytes_at_once)):
            copied = pages.index_select(0, (firsts + sources).flatten())
            pages.index_copy_(0, (firsts + destinations).flatten(), copied)
