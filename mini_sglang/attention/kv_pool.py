"""The memory of keys and values of all layers, cut into pages, and how page numbers reach the device that holds it.

Backends read and write the pool by page or by cell. It does not know who owns which page.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence

import numpy as np
import torch

from mini_sglang.kernels.interface import KVCells, indexable

_COPY_BYTES = 64 << 20  # that `copy_pages` copies at a time


class KVPool:
    """Per layer [2, num_pages, page_size, kv_heads, head_dim]: keys at index 0, values at 1 (NHD order).

    Values in float8_e4m3fn are stored with scale 1: rounded to 3 bits of mantissa, and saturated beyond ±448.
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
        self._memory = _zeros(shape, dtype, device)
        self.layers = self._memory.unbind()
        self._indexable = indexable(self._memory).unbind()  # the layers as they can be read and written by index
        # as rows of one dimension: beyond 2 GB torch would split a copy with more dimensions into one for each layer
        self._pages = indexable(self._memory).flatten(0, 2)
        # [2 num_layers, 1]: the indices in _pages of page 0 of each layer's keys, and of its values
        self._first_pages = torch.arange(0, 2 * num_layers * num_pages, num_pages, device=device).unsqueeze(1)
        # the same memory by cell (page id * page_size + offset): [num_cells, kv_heads, head_dim] of keys and of values
        self.key_cells = [layer[0].flatten(0, 1) for layer in self.layers]
        self.value_cells = [layer[1].flatten(0, 1) for layer in self.layers]
        self.dtype = dtype
        self.page_size = page_size
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim

    def cells(self, layer: int, cells: torch.Tensor) -> KVCells:
        """The place in one layer that a step stores to: `cells` [tokens] int64."""
        return KVCells(self.key_cells[layer], self.value_cells[layer], cells)

    def gather(self, layer: int, pages: torch.Tensor) -> torch.Tensor:
        """Keys and values of `pages` [n] in that order -> [2, n * page_size, kv_heads, head_dim] of the pool's dtype"""
        return self._indexable[layer].index_select(1, pages).view(self.dtype).flatten(1, 2)

    @staticmethod
    def bytes_per_page(num_layers: int, page_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        """Bytes of one page, keys and values of all layers."""
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


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros. On a CPU the system gives memory to a part of them when that is first written, on a GPU at once.

    Raises MemoryError or torch.OutOfMemoryError where there is not as much.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    try:
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"can't allocate memory: {num_bytes} bytes of keys and values: {error}") from error
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape)


def send(numbers: Sequence[object], device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
    """`numbers`, nested or not, as a tensor on `device`; integers are int64 unless `dtype` is given.

    The host does not wait for the copy.
    """
    return staged(numbers, device, dtype).to(device, non_blocking=True)


def staged(numbers: Sequence[object], device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
    """`numbers` as a tensor on the host, pinned unless `device` is a CPU.

    A copy from ordinary memory blocks the host until the device has done all that was queued before; one from pinned
    memory is queued like everything else.
    """
    tensor = torch.from_numpy(np.array(numbers))  # which reads lists five times as fast as torch.tensor does
    if dtype is not None:
        tensor = tensor.to(dtype)
    return tensor if device.type == "cpu" else tensor.pin_memory()
