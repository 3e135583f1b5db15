"""Every work item is computed once, on all threads of PyTorch, which sleep rather than spin where others want cores."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from numba import carray, cfunc

from mini_sglang.kernels.cpu.compiled import _pointer, next_work_item
from mini_sglang.kernels.cpu.kernels import ParallelKernel, SleepingTeam, SpinGuard

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


def spun_ns(work: ParallelKernel, counts: torch.Tensor) -> int:
    """CPU time of 20 short pieces of work with a pause behind each, in which threads may spin."""
    before = time.process_time_ns()
    for _ in range(20):
        work.run(counts.data_ptr())
        time.sleep(0.01)
    return time.process_time_ns() - before


@pytest.mark.skipif(sys.platform != "linux", reason="PyTorch's threads are GNU OpenMP's on Linux only")
@pytest.mark.skipif("OMP_WAIT_POLICY" in os.environ, reason="how threads wait is set from outside")
@pytest.mark.parametrize("threads", [2], indirect=True)
def test_beside_a_sleeping_team_threads_spin_less(threads: int) -> None:
    counts, work, team = torch.zeros(ITEMS, dtype=torch.int64), ParallelKernel(take_one), SleepingTeam()
    alone = spun_ns(work, counts)
    team.hold()
    beside = spun_ns(work, counts)
    team.release()
    after = spun_ns(work, counts)
    assert beside < min(alone, after) / 2, (alone, beside, after)


MS = 1_000_000


def test_the_guard_goes_by_the_share_of_time_that_threads_wait_for_a_core() -> None:
    guard = SpinGuard()
    guard.close()
    guard.judge(queued_ns=5 * MS, ran_ns=95 * MS)
    assert not guard.is_busy
    guard.judge(queued_ns=50 * MS, ran_ns=50 * MS)
    assert guard.is_busy
    for _ in range(10):
        guard.judge(queued_ns=0, ran_ns=100 * MS)
    assert guard.is_busy, "half a second says little"
    guard.judge(queued_ns=15 * MS, ran_ns=85 * MS)
    for _ in range(19):
        guard.judge(queued_ns=0, ran_ns=100 * MS)
    assert guard.is_busy, "it is one second in a row that counts"
    guard.judge(queued_ns=0, ran_ns=100 * MS)
    assert not guard.is_busy


def test_the_guard_learns_nothing_while_little_runs() -> None:
    guard = SpinGuard()
    guard.close()
    guard.judge(queued_ns=50 * MS, ran_ns=50 * MS)
    for _ in range(100):
        guard.judge(queued_ns=0, ran_ns=1 * MS)
    assert guard.is_busy


@pytest.mark.skipif(sys.platform != "linux", reason="PyTorch's threads are GNU OpenMP's on Linux only")
@pytest.mark.parametrize("threads", [2], indirect=True)
def test_the_guard_notices_busy_processes(threads: int) -> None:
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2 * (os.cpu_count() or 1))]
    guard, x = SpinGuard(), torch.randn(256, 256)
    deadline = time.monotonic() + 60
    try:
        while not guard.is_busy and time.monotonic() < deadline:
            x = (x @ x).clamp(-1, 1)
        assert guard.is_busy
    finally:
        guard.close()
        for other in others:
            other.kill()
            other.wait()
