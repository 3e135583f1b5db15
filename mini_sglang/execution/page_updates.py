"""Page ids on their way into the page table of steps that lie in CUDA graphs: the device fetches them by itself.

A copy and a scatter of their own cost the host several times what a replay costs. So the host writes what a step brings
into a ring in pinned memory, and the step's first kernel reads it there. Device and host both count the steps; step n
has entry n % DEPTH, which is free again when step n has run. Knows tensors only.

    entry   | number of pages | places in the page table ... | page ids ... |
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from mini_sglang.kernels.decode_step import take_pages

DEPTH = 64  # more steps than may be launched before the oldest has been read


class PageUpdates:
    """Up to `capacity` pages per step for `page_table` [slots, max pages] int64."""

    def __init__(self, page_table: torch.Tensor, capacity: int) -> None:
        self.capacity = capacity
        self._page_table = page_table
        on_gpu = page_table.is_cuda
        self._ring = torch.zeros(DEPTH, 1 + 2 * capacity, dtype=torch.int64, pin_memory=on_gpu)
        self._entries = self._ring.numpy()  # the same memory
        self._launched = 0
        self._taken = torch.zeros(1, dtype=torch.int64, device=page_table.device)  # steps that the device has begun

    def put(self, pages: Mapping[int, int]) -> None:
        """Hand the next step its pages, by place in the flat page table; to be called before each step is launched."""
        if len(pages) > self.capacity:
            raise ValueError(f"a step takes at most {self.capacity} new pages, one per row, got {len(pages)}")
        entry = self._entries[self._launched % DEPTH]
        entry[0] = len(pages)
        if pages:
            entry[1 : 1 + len(pages)] = list(pages)
            entry[1 + self.capacity :][: len(pages)] = list(pages.values())
        self._launched += 1

    def take(self) -> None:
        """Write the step's pages into the page table. What a graph captures, before anything reads the table."""
        take_pages(self._ring, self._taken, self._page_table)

    def restart(self) -> None:
        """Count from 0 again: what was computed while capturing were no steps."""
        self._taken.zero_()
        self._launched = 0
