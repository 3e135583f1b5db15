"""Compiles kernels in parallel before they are needed; Triton compiles each at its first launch, one after the other.

Within `Precompile.recording`, launches of kernels that are not compiled yet are recorded and do not happen; compiled
kernels are launched. So what runs there computes nothing useful: capture it in a CUDA graph that is thrown away.
Threads are enough, since most of Triton's compiler, the assembler and the C compiler run without Python's lock. Knows
no kernel and no model.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
import triton

logger = logging.getLogger(__name__)

_HOOK_LOCK = threading.Lock()  # Triton has one hook for the whole process
_MAX_THREADS = 8  # more only wait for each other: a quarter of the work needs Python's lock


class Precompile:
    """Compiles kernels for the current device in the background, from the end of `recording` to `wait`."""

    def __init__(self) -> None:
        self._begin = time.monotonic()
        self._kernels: list[Future[object]] = []
        self._pool = ThreadPoolExecutor(
            min(_MAX_THREADS, len(os.sched_getaffinity(0))),
            thread_name_prefix="compile",
            initializer=torch.cuda.set_device,
            initargs=(torch.cuda.current_device(),),
        )

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the kernels that this thread launches; they start to compile at the end, in the order of launches."""
        runtime, this_thread = triton.knobs.runtime, threading.get_ident()
        previous: Any = None
        recorded: dict[tuple[Any, str], str] = {}  # (function, key of the compiled kernel) -> specialization data

        def record(**about: Any) -> bool | None:
            """Triton calls this for a kernel that is not compiled yet; True: neither compile nor launch it."""
            if threading.get_ident() == this_thread:
                recorded[about["fn"].jit_function, about["key"]] = about["compile"]["specialization_data"]
                return True
            return None if previous is None else bool(previous(**about))

        with _HOOK_LOCK:
            previous, runtime.jit_cache_hook = runtime.jit_cache_hook, record
            try:
                yield
            finally:
                runtime.jit_cache_hook = previous
        # not earlier: a launch would take a kernel that another thread has compiled but not loaded yet
        self._kernels += [self._pool.submit(_prepare, function, data) for (function, _), data in recorded.items()]

    def wait(self) -> None:
        """Wait until all kernels are compiled; raises what the compiler raised."""
        self._pool.shutdown()
        for kernel in self._kernels:
            kernel.result()
        logger.info("%d kernels compiled within %.1f s", len(self._kernels), time.monotonic() - self._begin)


def _prepare(function: Any, specialization: str) -> object:
    """Compile a kernel, put it where launches look for it, and load it together with its launcher.

    The launcher is C code in Triton up to 3.6; the C compiler takes as long for it as Triton for a small kernel.
    """
    return function.preload(specialization).run
