"""Pinned memory through which the host and captured steps exchange data: page ids go in, sampled tokens come out.

A copy of its own would cost the host several times what a replay costs. So the device reads and writes this memory by
itself: a step's first kernel fetches the pages, its last one stores the tokens. Device and host both count the steps;
step n owns entry n % DEPTH of each ring until step n + DEPTH. Knows tensors only.

    entry of pages    | number of pages | places in the page table ... | page ids ... |
    entry of tokens   | token of each row ... |
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping

import torch

from mini_sglang.kernels.triton.decode_step import update_page_table, write_tokens

DEPTH = 64  # more steps than may be launched before the oldest has been read


class PinnedRing:
    """Up to `rows` pages per step for `page_table` [slots, max pages] int64, and a token for each of up to `rows`."""

    def __init__(self, page_table: torch.Tensor, rows: int) -> None:
        self.rows = rows
        self.device = page_table.device
        self._page_table = page_table
        on_gpu = page_table.is_cuda
        self._pages = torch.zeros(DEPTH, 1 + 2 * rows, dtype=torch.int64, pin_memory=on_gpu)
        self._tokens = torch.zeros(DEPTH, rows, dtype=torch.int64, pin_memory=on_gpu)
        self._page_entries, self._token_entries = _entries(self._pages), _entries(self._tokens)
        self._launched = 0
        self._begun = torch.zeros(1, dtype=torch.int64, device=page_table.device)  # steps, by the device's count

    # -- the host's side ----------------------------------------------------------------------------------------------

    def put(self, pages: Mapping[int, int]) -> None:
        """Store the next step's pages, by place in the flat page table. Call this before each step is launched."""
        if len(pages) > self.rows:
            raise ValueError(f"a step takes at most {self.rows} new pages, got {len(pages)}")
        entry = self._page_entries[self._launched % DEPTH]
        number = entry[0] = len(pages)
        if number:
            entry[1 : 1 + number] = array("q", list(pages))
            entry[1 + self.rows : 1 + self.rows + number] = array("q", list(pages.values()))
        self._launched += 1

    def tokens(self, rows: int) -> memoryview[int]:
        """The first `rows` tokens of the latest step, valid from its end until its entry is used again."""
        return self._token_entries[(self._launched - 1) % DEPTH][:rows]

    # -- the device's side: what a graph captures ---------------------------------------------------------------------

    def take(self) -> None:
        """Begin a step: write its pages into the page table, before anything reads that."""
        update_page_table(self._pages, self._begun, self._page_table)

    def leave(self, token_ids: torch.Tensor) -> None:
        """End the step that `take` has begun: leave its tokens [at most rows] int64."""
        write_tokens(token_ids, self._begun, self._tokens)

    def restart(self) -> None:
        """Count from 0 again: what was computed while capturing were no steps."""
        self._begun.zero_()
        self._launched = 0


def _entries(ring: torch.Tensor) -> list[memoryview[int]]:
    """The rows of a ring as plain buffers, which Python fills and reads several times faster than arrays or tensors."""
    return [memoryview(entry.numpy()).cast("B").cast("q") for entry in ring]
