"""Compiled code on the threads that PyTorch multiplies with: shares of work, for whichever of them is free.

Threads of its own would fight with PyTorch's for the processor, which spin for a while after each product. Knows
nothing of what is computed.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable
from typing import Any

import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic


class SharedWork:
    """A kernel, compiled by `numba.cfunc` as void(voidptr), that takes shares with `next_share` until none is left."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel  # its code lives as long as this
        self._alone: Callable[[int], None] = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(kernel.address)
        self._together = _parallel_call()

    def run(self, *numbers: int, alone: bool = False) -> None:
        """Run the kernel on every thread; it finds int64s at its address: 0, for `next_share`, and then `numbers`.

        On this thread alone where that is asked for, or PyTorch's are not OpenMP's, as in builds for macOS.
        """
        data = array("q", (0, *numbers))
        address, _ = data.buffer_info()
        if alone or self._together is None or (threads := torch.get_num_threads()) == 1:
            self._alone(address)
        else:
            self._together(self._kernel.address, address, threads, 0)


def _parallel_call() -> Callable[[int, int, int, int], None] | None:
    """GOMP_parallel(function, data, threads, flags) of the OpenMP library that PyTorch is linked with, if it is one."""
    try:
        call = ctypes.CDLL(torch._C.__file__).GOMP_parallel  # found in what this library depends on
    except AttributeError:
        return None
    call.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    call.restype = None
    return call


@intrinsic
def next_share(typing_context: Any, address: Any) -> Any:
    """The next number, from 0 on, that no thread has taken yet; counted in the int64 at `address`, a void pointer."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        int64 = ir.IntType(64)
        counter = builder.bitcast(arguments[0], int64.as_pointer())
        return builder.atomic_rmw("add", counter, ir.Constant(int64, 1), "monotonic")

    return types.int64(types.voidptr), generate
