"""The threads that PyTorch multiplies with, GNU OpenMP's: work for all of them, and how they wait for it.

Threads of our own would compete for the cores with PyTorch's. Knows no kernel.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import time
from array import array
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch

logger = logging.getLogger(__name__)

_INTERVAL_S = 0.05
_LEAST_RUN_NS = 10_000_000  # of an interval, or it says nothing
_BUSY_SHARE = 0.2  # of the time in which threads could run, that they waited for a core
_QUIET_SHARE = 0.1
_QUIET_INTERVALS = 20  # one after the other, until threads spin again
_TASKS = Path("/proc/self/task")


class ParallelKernel:
    """A kernel of type void(voidptr), from `numba.cfunc`, whose threads take work items until none is left."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel  # keeps the compiled code alive
        self._call_here: Callable[[int], None] = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(kernel.address)
        self._call_on_threads = _openmp_call()

    def run(self, *numbers: int, single_thread: bool = False) -> None:
        """Run the kernel on every thread, over int64s: 0, the counter for `next_work_item`, and then `numbers`.

        It runs on this thread alone with `single_thread`, or if PyTorch's threads are not OpenMP's, as on macOS.
        """
        data = array("q", (0, *numbers))
        address, _ = data.buffer_info()
        if single_thread or self._call_on_threads is None or (threads := torch.get_num_threads()) == 1:
            self._call_here(address)
        else:
            self._call_on_threads(self._kernel.address, address, threads, 0)


class SpinGuard:
    """Has OpenMP's threads sleep while they wait, as long as other processes want the cores, until `close`.

    A thread that waits for the others spins for 3 ms before it sleeps. On cores of its own that saves a third of a
    decode step; on cores that it shares, it spins away the time that the others need. The library shortens the wait to
    100 rounds while it has more threads than there are cores (`gomp_throttled_spin_count_var` in its env.c). So while
    this process's threads have to queue for cores, a team of that size is held here, asleep.
    """

    def __init__(self) -> None:
        self.is_busy = False
        self._quiet_intervals = 0
        self._closing = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="spin guard", daemon=True)
        if torch.get_num_threads() > 1 and _openmp_call() is not None and _TASKS.exists():
            self._watcher.start()

    def close(self) -> None:
        """Let threads wait as they did before."""
        self._closing.set()
        if self._watcher.is_alive():
            self._watcher.join()

    def _watch(self) -> None:
        team, queued, ran = SleepingTeam(), _queued_ns(), time.process_time_ns()
        while not self._closing.wait(_INTERVAL_S):
            queued, queued_before = _queued_ns(), queued
            ran, ran_before = time.process_time_ns(), ran
            was_busy = self.is_busy
            self.judge(queued - queued_before, ran - ran_before)
            if self.is_busy and not was_busy:
                team.hold()
            elif was_busy and not self.is_busy:
                team.release()
        if self.is_busy:
            team.release()

    def judge(self, queued_ns: int, ran_ns: int) -> None:
        """Set `is_busy` by an interval in which threads waited for a core and ran this long, all of them together."""
        if ran_ns < _LEAST_RUN_NS:
            return
        share = queued_ns / (queued_ns + ran_ns)
        self._quiet_intervals = self._quiet_intervals + 1 if share < _QUIET_SHARE else 0
        if share > _BUSY_SHARE:
            self.is_busy = True
        elif self._quiet_intervals >= _QUIET_INTERVALS:
            self.is_busy = False


class SleepingTeam:
    """More OpenMP threads than there are cores, asleep between `hold` and `release`."""

    def hold(self) -> None:
        self._released = threading.Event()
        self._leader = threading.Thread(target=self._lead, args=(self._released,), name="sleeping team", daemon=True)
        self._leader.start()

    def release(self) -> None:
        self._released.set()
        self._leader.join()  # a team ends with the thread that leads it

    @staticmethod
    def _lead(released: threading.Event) -> None:
        call, nothing = _openmp_call(), ctypes.cast(ctypes.CDLL(None).free, ctypes.c_void_p).value  # frees no memory: 0
        if call is not None and nothing is not None:
            call(nothing, 0, len(os.sched_getaffinity(0)) + 1, 0)
        released.wait()


def _queued_ns() -> int:
    """Nanoseconds that the process's threads have waited for a core although they could run."""
    queued = 0
    for task in _TASKS.iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            queued += int((task / "schedstat").read_text().split()[1])
    return queued


@cache
def _openmp_call() -> Callable[[int, int, int, int], None] | None:
    """GOMP_parallel(function, data, threads, flags) of the OpenMP library that PyTorch is linked with, or None."""
    try:
        call = ctypes.CDLL(torch._C.__file__).GOMP_parallel  # found among the library's dependencies
    except AttributeError:
        logger.warning("PyTorch's threads are not those of GNU OpenMP: attention of decodes runs on one thread")
        return None
    call.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    call.restype = None
    return call
