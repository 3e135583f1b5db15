"""Decode steps as CUDA graphs: one per batch size, each a whole step from the slots to the sampled tokens.

A replay costs the host one launch, and one copy of the slots if they are not those of the step before. Batches between
two captured sizes are filled up with an idle slot, whose row computes and changes nothing that anybody reads.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

logger = logging.getLogger(__name__)


class DecodeStep(NamedTuple):
    token_ids: torch.Tensor  # [rows] int64
    logits: torch.Tensor  # [rows, vocab]


class DecodeGraphs:
    """Captures `step`, a function from slots [rows] int64 to what it sampled, for every batch up to `max_rows`."""

    def __init__(
        self, step: Callable[[torch.Tensor], DecodeStep], max_rows: int, idle_slot: int, device: torch.device
    ) -> None:
        start = time.perf_counter()
        self.max_rows = max_rows
        self._slots = torch.full((max_rows,), idle_slot, dtype=torch.int64, device=device)
        self._loaded: tuple[int, ...] = ()  # what self._slots begins with
        self._idle_slot = idle_slot
        self._sizes = graph_sizes(max_rows)
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, DecodeStep]] = {}
        pool = None
        for size in reversed(self._sizes):  # the largest first: the others fit into its memory
            slots = self._slots[:size]
            step(slots)  # compiles what is compiled on first use
            torch.cuda.synchronize(device)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                outputs = step(slots)
            pool = pool or graph.pool()
            self._graphs[size] = (graph, outputs)
        logger.info("captured %d CUDA graphs in %.1f s", len(self._graphs), time.perf_counter() - start)

    def replay(self, slots: tuple[int, ...]) -> DecodeStep:
        """Run one step for `slots`, at most `max_rows`; the very same tuple as last time is on the device already.

        The tensors hold until the next replay.
        """
        size = next(size for size in self._sizes if size >= len(slots))
        if slots is not self._loaded:
            padded = slots + (self._idle_slot,) * (size - len(slots))
            self._slots[:size].copy_(torch.tensor(padded, pin_memory=True), non_blocking=True)
            self._loaded = slots
        graph, outputs = self._graphs[size]
        graph.replay()
        return DecodeStep(outputs.token_ids[: len(slots)], outputs.logits[: len(slots)])


def graph_sizes(max_rows: int) -> list[int]:
    """1, 2, 4 and the multiples of 8 up to `max_rows`, which is always the last."""
    sizes = [size for size in (1, 2, 4, *range(8, max_rows, 8)) if size < max_rows]
    return [*sizes, max_rows]
