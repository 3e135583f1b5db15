"""Fills slots on a few threads: what is computed and copied for one layer of a model does not wait for another.

Every thread has torch compute on it alone. With threads of torch's own instead, all would wait for the slowest after
each of many small operations, which takes long where other processes want the same cores.
"""

from __future__ import annotations

import ctypes
import math
import re
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from mini_sglang.weights.progress import progress
from mini_sglang.weights.tensor import CheckpointTensor, WeightSlot

_MOST_THREADS = 4  # each holds a tensor and the dense weights of a layer that is not yet laid out
_LAYER = re.compile(r"(.*\blayers\.\d+)\..*")

Pair = tuple[CheckpointTensor, WeightSlot]


def fill_slots(plan: Sequence[Pair], title: str, *, show_progress: bool) -> None:
    """Load every tensor into its slot, those of a layer of the model in order on one thread, the largest layers first.

    Beside the model there is one tensor for each thread at a time. As soon as one fails no other layer is begun, and
    its error is raised.
    """
    layers: dict[str, list[Pair]] = {}
    for tensor, slot in plan:
        match = _LAYER.fullmatch(tensor.name)
        layers.setdefault(match[1] if match else tensor.name, []).append((tensor, slot))
    jobs = sorted(layers.values(), key=_largest, reverse=True)
    threads = torch.get_num_threads()
    if min(threads, len(jobs)) == 1 or torch.cuda.is_initialized():  # copies to a GPU follow each other anyway
        for job in progress(jobs, title, show=show_progress):
            _fill(job)
        return
    pool = ThreadPoolExecutor(min(threads, _MOST_THREADS), "load", torch.set_num_threads, (1,))
    try:
        for filled in progress([pool.submit(_fill, job) for job in jobs], title, show=show_progress):
            filled.result()
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(threads)  # as it is for threads that are yet to be started
        _trim_memory()


def _largest(job: Iterable[Pair]) -> int:
    return max(math.prod(tensor.shape) for tensor, _ in job)


def _fill(job: Iterable[Pair]) -> None:
    for tensor, slot in job:
        slot.load(tensor)


def _trim_memory() -> None:
    """Give what threads have freed back to the system: glibc keeps it for each of them, 100 MB for a small model."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # other C libraries have none
    if trim is not None:
        trim(0)
