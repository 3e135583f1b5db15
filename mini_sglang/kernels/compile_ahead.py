"""Compiles kernels side by side before they are needed. Triton compiles one when it is first launched, the next after.

While `CompileAhead.noting` is entered, a launch of a kernel that is not compiled yet has it compiled by a pool of
threads and launches nothing. So whatever runs meanwhile must not be relied on, nor may anything be computed from it on
the device: capture it in a CUDA graph that is thrown away. (Most of the compiler, and the assembler, runs without
Python's lock.) Knows no kernel and no model.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Hashable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
import triton

logger = logging.getLogger(__name__)

_MOST_THREADS = 16  # more only wait for Python's lock


class CompileAhead:
    """Kernels for the current device, whose compiling goes on in the background from their first launch to `wait`."""

    def __init__(self) -> None:
        self._begin = time.monotonic()
        self._kernels: dict[Hashable, Future[object]] = {}
        self._pool = ThreadPoolExecutor(
            min(_MOST_THREADS, len(os.sched_getaffinity(0))),
            thread_name_prefix="compile",
            initializer=torch.cuda.set_device,
            initargs=(torch.cuda.current_device(),),
        )

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Within, launches of this thread compile what they need and do not happen."""
        runtime, this_thread = triton.knobs.runtime, threading.get_ident()
        previous = runtime.jit_cache_hook

        def note(**about: Any) -> bool | None:
            """Called by Triton for a kernel that is not compiled; True: neither compile nor launch it."""
            if threading.get_ident() == this_thread and not about["is_manual_warmup"]:
                self._start(about["fn"].jit_function, about["key"], about["compile"]["specialization_data"])
                return True
            return None if previous is None else bool(previous(**about))

        runtime.jit_cache_hook = note
        try:
            yield
        finally:
            runtime.jit_cache_hook = previous

    def _start(self, function: Any, key: str, specialization: str) -> None:
        if (function, key) not in self._kernels:
            self._kernels[function, key] = self._pool.submit(_prepare, function, specialization)

    def wait(self) -> None:
        """Until all kernels are compiled; raises what the compiler raised."""
        self._pool.shutdown()
        for kernel in self._kernels.values():
            kernel.result()
        logger.info("%d kernels compiled within %.1f s", len(self._kernels), time.monotonic() - self._begin)


def _prepare(function: Any, specialization: str) -> object:
    """Compile a kernel, put it where launches look for it, and load it together with the code that launches it.

    That code is C in Triton up to 3.6, and takes the compiler of C as long as a small kernel takes Triton.
    """
    return function.preload(specialization).run
