"""Whole steps as CUDA graphs, one per size: a replay costs the host one launch, and a copy of what has changed.

`DecodeGraphs` holds steps of one token per row, from the slots to the sampled tokens. Batches between two captured
sizes are padded with an idle slot, whose row changes nothing that a request reads.
"""

from __future__ import annotations

import ctypes
import logging
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from mini_sglang.attention.kv_pool import staged
from mini_sglang.weights.progress import progress

if TYPE_CHECKING:  # it needs Triton
    from mini_sglang.execution.pinned_ring import PinnedRing

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GraphStep:
    """The outputs of a captured step. They hold until the next replay of any graph."""

    token_ids: torch.Tensor  # [rows] int64
    logits: torch.Tensor  # [rows, vocab]


class StepGraphs:
    """Captures `step`, a function of the size whose input tensors stay in place, for each of the ascending `sizes`.

    Graphs of one `pool` (torch.cuda.graph_pool_handle()) share memory for intermediate results, so only one may run at
    a time. `prepare` fills the inputs of the largest size with something that can be computed.
    """

    def __init__(
        self,
        step: Callable[[int], GraphStep],
        sizes: list[int],
        name: str,
        pool: Any,
        prepare: Callable[[int], None] = lambda size: None,
    ) -> None:
        self.sizes = sizes
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, GraphStep]] = {}
        self._views: dict[tuple[int, int], GraphStep] = {}  # (size, rows) -> the outputs of the first rows
        descending = sizes[::-1]  # the largest first: the others fit into its memory
        prepare(descending[0])
        step(descending[0])  # once outside of a capture, for what libraries set up on first use
        for size in progress(descending, f"Capturing {name} graphs"):
            graph = torch.cuda.CUDAGraph(keep_graph=size == 1)
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="relaxed"):  # kernels may be loaded in it
                outputs = step(size)
            if size == 1:
                share_memory_alike(graph, _ONE_STREAM_SHARED)
                graph.instantiate()
            self._graphs[size] = (graph, outputs)

    def size_for(self, count: int) -> int:
        """The smallest captured size that holds `count`."""
        return self.sizes[bisect_left(self.sizes, count)]

    def replay(self, size: int, rows: int) -> GraphStep:
        """Run the step of `size`, and return the outputs of its first `rows` rows."""
        graph, outputs = self._graphs[size]
        graph.replay()
        if (size, rows) not in self._views:
            self._views[size, rows] = GraphStep(outputs.token_ids[:rows], outputs.logits[:rows])
        return self._views[size, rows]


class DecodeGraphs:
    """Graphs of `step`, a function of slots [rows] int64 on the device, for every batch that `ring` has room for."""

    def __init__(self, step: Callable[[torch.Tensor], GraphStep], ring: PinnedRing, idle_slot: int, pool: Any) -> None:
        self.max_rows = ring.rows
        self._idle_slot = idle_slot
        self._ring = ring
        self._slots = torch.full((ring.rows,), idle_slot, dtype=torch.int64, device=ring.device)
        self._loaded: tuple[int, ...] = ()  # the slots at the start of self._slots

        def whole_step(size: int) -> GraphStep:
            self._ring.take()
            outputs = step(self._slots[:size])
            self._ring.leave(outputs.token_ids)
            return outputs

        self._graphs = StepGraphs(whole_step, graph_sizes(ring.rows), "decode", pool)
        self._ring.restart()

    def replay(self, slots: tuple[int, ...], pages: Mapping[int, int]) -> GraphStep:
        """Run one step for `slots`, which gain `pages` (place in the flat page table -> page id).

        There are at most `max_rows` of either. Slots equal to those of the last call are on the device already.
        """
        size = self._graphs.size_for(len(slots))
        if slots != self._loaded:
            padded = slots + (self._idle_slot,) * (size - len(slots))
            self._slots[:size].copy_(staged(padded, self._slots.device), non_blocking=True)
            self._loaded = slots
        # after everything that may fail, since host and device must count the same steps
        self._ring.put(pages)
        return self._graphs.replay(size, len(slots))

    def on_host(self, rows: int) -> memoryview[int]:
        """The host memory to which the last replay writes its first `rows` tokens; see `PinnedRing.tokens`."""
        return self._ring.tokens(rows)


def graph_sizes(max_rows: int) -> list[int]:
    """1, 2, 4 and the multiples of 8 up to `max_rows`, which is always the last."""
    sizes = [size for size in (1, 2, 4, *range(8, max_rows, 8)) if size < max_rows]
    return [*sizes, max_rows]


def share_memory_alike(graph: torch.cuda.CUDAGraph, percent: int) -> None:
    """Have all kernels of a captured graph ask for `percent` of what can be shared memory, or what they need of it.

    Kernels that divide a multiprocessor's memory differently cannot be on it at once, even where the next may start
    before the last has ended (`kernels/triton/pdl.py`); and the driver, unasked, divides it for each kernel alone. The
    graph is not instantiated yet. A driver that is too old for it is left to its choice, with a warning.
    """
    driver = ctypes.CDLL("libcuda.so.1")
    number = ctypes.c_size_t()
    raw_graph = ctypes.c_void_p(graph.raw_cuda_graph())
    _check(driver.cuGraphGetNodes(raw_graph, None, ctypes.byref(number)))
    nodes = (ctypes.c_void_p * number.value)()
    _check(driver.cuGraphGetNodes(raw_graph, nodes, ctypes.byref(number)))
    value = (ctypes.c_uint * 16)(percent)  # a CUlaunchAttributeValue, of 64 bytes
    for node in map(ctypes.c_void_p, nodes):
        kind = ctypes.c_int()
        _check(driver.cuGraphNodeGetType(node, ctypes.byref(kind)))
        if kind.value == _KERNEL_NODE and driver.cuGraphKernelNodeSetAttribute(node, _SHARED_MEMORY_CARVEOUT, value):
            logger.warning("this driver does not take the division of memory that kernels of a graph ask for")
            return


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"the CUDA driver could not read a graph: error {status}")


_ONE_STREAM_SHARED = 25  # percent; with one row few programs of attention meet on a multiprocessor
_KERNEL_NODE = 0  # CU_GRAPH_NODE_TYPE_KERNEL
_SHARED_MEMORY_CARVEOUT = 14  # CU_LAUNCH_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
