"""Every work item is computed once, on all threads of PyTorch, which sleep rather than spin where others want cores."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from numba import carray, cfunc

from mini_sglang.kernels.cpu.compiled import next_work_item, pointer
from mini_sglang.kernels.cpu.kernels import ParallelKernel, SleepingTeam, SpinGuard

ITEMS = 10_000


@cfunc("void(voidptr)")  # type: ignore[untyped-decorator]
def count_up(data: Any) -> None:
    """Add 1 to the count of each work item."""
    numbers = carray(data, (2,), np.int64)
    counts = carray(pointer(numbers[1]), (ITEMS,), np.int64)
    item = next_work_item(data)
    while item < ITEMS:
        counts[item] += 1
        item = next_work_item(data)


@cfunc("void(voidptr)")  # type: ignore[untyped-decorator]
def take_one(data: Any) -> None:
    """Add 1 to the count of one work item."""
    numbers = carray(data, (2,), np.int64)
    counts = carray(pointer(numbers[1]), (ITEMS,), np.int64)
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


def looks(guard: SpinGuard, count: int, *, ran_ms: int, queued_ms: int) -> bool:
    """Whether the guard sees a crowd after some looks that all say the same."""
    for _ in range(count):
        guard.judge(ran_ms * MS, queued_ms * MS)
    return guard.is_crowded


@pytest.fixture
def guard() -> Iterator[SpinGuard]:
    guard = SpinGuard()
    yield guard
    guard.close()


def test_a_crowd_is_a_thread_that_queues_for_150_ms_in_a_row(guard: SpinGuard) -> None:
    assert not looks(guard, 100, ran_ms=35, queued_ms=5)
    assert not looks(guard, 3, ran_ms=25, queued_ms=15)
    assert not looks(guard, 1, ran_ms=40, queued_ms=0)
    assert not looks(guard, 3, ran_ms=25, queued_ms=15), "the row was broken"
    assert looks(guard, 1, ran_ms=25, queued_ms=15)


def test_one_long_step_is_enough_to_see_a_crowd(guard: SpinGuard) -> None:
    assert looks(guard, 1, ran_ms=600, queued_ms=500)


def test_a_crowd_has_gone_after_a_second_in_a_row_without_a_queue(guard: SpinGuard) -> None:
    assert looks(guard, 4, ran_ms=25, queued_ms=15)
    assert looks(guard, 24, ran_ms=39, queued_ms=1)
    assert looks(guard, 1, ran_ms=30, queued_ms=10)
    assert looks(guard, 24, ran_ms=39, queued_ms=1), "the row was broken"
    assert not looks(guard, 1, ran_ms=39, queued_ms=1)


def test_a_thread_that_did_not_run_says_nothing(guard: SpinGuard) -> None:
    assert not looks(guard, 1000, ran_ms=0, queued_ms=0)
    assert looks(guard, 4, ran_ms=25, queued_ms=15)
    assert looks(guard, 1000, ran_ms=0, queued_ms=0)


@pytest.mark.skipif(sys.platform != "linux", reason="PyTorch's threads are GNU OpenMP's on Linux only")
def test_no_thread_is_left_of_a_guard_that_ended_in_a_crowd() -> None:
    before, guard = threading.active_count(), SpinGuard()
    assert looks(guard, 4, ran_ms=25, queued_ms=15)
    assert threading.active_count() == before + 1
    guard.close()
    assert threading.active_count() == before


@pytest.mark.skipif(sys.platform != "linux", reason="PyTorch's threads are GNU OpenMP's on Linux only")
@pytest.mark.parametrize("threads", [2], indirect=True)
def test_the_guard_notices_busy_processes(guard: SpinGuard, threads: int) -> None:
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2 * (os.cpu_count() or 1))]
    x = torch.randn(256, 256)
    deadline = time.monotonic() + 60
    try:
        while not guard.is_crowded and time.monotonic() < deadline:
            x = (x @ x).clamp(-1, 1)
            guard.check()
        assert guard.is_crowded
    finally:
        for other in others:
            other.kill()
            other.wait()
