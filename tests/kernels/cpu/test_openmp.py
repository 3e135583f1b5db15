"""Every work item is computed once, on as many threads as PyTorch has."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from numba import carray, cfunc

from mini_sglang.kernels.cpu.compiled import _pointer, next_work_item
from mini_sglang.kernels.cpu.openmp import ParallelKernel

ITEMS = 10_000


@cfunc("void(voidptr)")  # type: ignore[untyped-decorator]
def count_up(data: Any) -> None:
    """Add 1 to the count of each work item."""
    numbers = carray(data, (2,), np.int64)
    counts = carray(_pointer(numbers[1]), (ITEMS,), np.int64)
    item = next_work_item(data)
    while item < ITEMS:
        counts[item] += 1
        item = next_work_item(data)


@cfunc("void(voidptr)")  # type: ignore[untyped-decorator]
def take_one(data: Any) -> None:
    """Add 1 to the count of one work item."""
    numbers = carray(data, (2,), np.int64)
    counts = carray(_pointer(numbers[1]), (ITEMS,), np.int64)
    counts[next_work_item(data)] += 1


@pytest.fixture
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.skipif(sys.platform != "linux", reason="PyTorch's threads are GNU OpenMP's on Linux only")
@pytest.mark.parametrize("threads", [2, 4], indirect=True)
def test_every_thread_takes_part(threads: int) -> None:
    counts = torch.zeros(ITEMS, dtype=torch.int64)
    ParallelKernel(take_one).run(counts.data_ptr())
    assert counts.tolist() == [1] * threads + [0] * (ITEMS - threads)


@pytest.mark.parametrize("threads", [1, 4], indirect=True)
def test_every_work_item_is_taken_once(threads: int) -> None:
    counts, work = torch.zeros(ITEMS, dtype=torch.int64), ParallelKernel(count_up)
    for _ in range(20):
        work.run(counts.data_ptr())
    assert counts.tolist() == [20] * ITEMS
