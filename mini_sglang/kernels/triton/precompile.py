"""Compiles kernels side by side before they are needed. Triton compiles one when it is first launched, the next after.

Within `Precompile.recording`, launches of kernels that are not compiled yet are recorded and do not happen; those that
are go on. So what is launched there must not be computed: capture it in a CUDA graph that is thrown away. Threads are
enough, since most of the compiler, the assembler and the compiler of C run without Python's lock. Knows no kernel and
no model.
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

_ONE_AT_A_TIME = threading.Lock()  # Triton has one hook for the whole process
_MOST_THREADS = 8  # more only wait for each other: a quarter of the work needs Python's lock


class Precompile:
    """Kernels of the current device that are compiled in the background, from the end of `recording` to `wait`."""

    def __init__(self) -> None:
        self._begin = time.monotonic()
        self._kernels: list[Future[object]] = []
        self._pool = ThreadPoolExecutor(
            min(_MOST_THREADS, len(os.sched_getaffinity(0))),
            thread_name_prefix="compile",
            initializer=torch.cuda.set_device,
            initargs=(torch.cuda.current_device(),),
        )

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the kernels that this thread launches; their compiling begins at the end, in the order of launches."""
        runtime, this_thread = triton.knobs.runtime, threading.get_ident()
        previous: Any = None
        recorded: dict[tuple[Any, str], str] = {}  # (function, key of the compiled kernel) -> how it is specialised

        def record(**about: Any) -> bool | None:
            """Called by Triton for a kernel that is not compiled; True: neither compile nor launch it."""
            if threading.get_ident() == this_thread:
                recorded[about["fn"].jit_function, about["key"]] = about["compile"]["specialization_data"]
                return True
            return None if previous is None else bool(previous(**about))

        with _ONE_AT_A_TIME:
            previous, runtime.jit_cache_hook = runtime.jit_cache_hook, record
            try:
                yield
            finally:
                runtime.jit_cache_hook = previous
        # no sooner: a launch would take a kernel that another thread has compiled but not loaded yet
        self._kernels += [self._pool.submit(_prepare, function, data) for (function, _), data in recorded.items()]

    def wait(self) -> None:
        """Until all kernels are compiled; raises what the compiler raised."""
        self._pool.shutdown()
        for kernel in self._kernels:
            kernel.result()
        logger.info("%d kernels compiled within %.1f s", len(self._kernels), time.monotonic() - self._begin)


def _prepare(function: Any, specialization: str) -> object:
    """Compile a kernel, put it where launches look for it, and load it together with the code that launches it.

    That code is C in Triton up to 3.6, and takes the compiler of C as long as a small kernel takes Triton.
    """
    return function.preload(specialization).run
