"""`Kernels` for a CPU: fused kernels on the threads that PyTorch multiplies with.

A decode step of a small model is a few milliseconds of matrix products between hundreds of operations on a few hundred
numbers each: PyTorch takes longer to call such an operation than to compute it. And a prompt's tokens would pass
through memory once for each operation that is fused here. Attention and steps of many rows run on all of PyTorch's
threads; few rows run on one, since waking the others takes as long. Threads of our own would compete for the processor
with PyTorch's, which spin for a while after each product: `SpinGuard` ends that where other processes want the cores.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import time
import weakref
from array import array
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from mini_sglang.kernels.cpu.compiled import compiled_for, float_bits
from mini_sglang.kernels.cpu.compiled_packed import PackedForm, compiled_packed
from mini_sglang.kernels.cpu.linear import CpuMatrix
from mini_sglang.kernels.cpu.packed import PackedMatrix
from mini_sglang.kernels.interface import PLAIN_EXPERTS, ExpertVariant, KVCells, Matrix, Rotation
from mini_sglang.kernels.torch_experts import TorchExperts, each_bias
from mini_sglang.kernels.torch_kernels import TorchKernels, TorchMatrix, dense_experts
from mini_sglang.weights.quantized_weight import QuantizedWeight

logger = logging.getLogger(__name__)

# A thread's nanoseconds on a core, and in a queue for one; Linux has it.
_SCHEDSTAT = Path("/proc/thread-self/schedstat")
_LOOK_INTERVAL_NS = 20_000_000
_CROWDED_SHARE = 0.15  # of the time in which a thread could run, that it queued
_CROWDED_AFTER_NS = 150_000_000
_QUIET_SHARE = 0.1
_QUIET_AFTER_NS = 1_000_000_000

FEW_ROWS = 32  # at most this many rows are computed by one thread


class CpuKernels:
    """`Kernels` for one dtype, float32 or bfloat16. Numba compiles them on first use and caches them on disk."""

    max_queries = 8  # of a block of attention, which share what is read of keys and values

    def __init__(self, dtype: torch.dtype) -> None:
        self._element = np.float32 if dtype == torch.float32 else np.uint16
        compiled = compiled_for(self._element)
        self._rms_norm, self._rope_store, self._silu_mul, self._attend = map(ParallelKernel, compiled)
        self._packed: dict[PackedForm, tuple[ParallelKernel, ParallelKernel]] = {}
        self._prepack = CpuMatrix.available(dtype)
        self._torch = TorchKernels()
        self._spin_guard = SpinGuard()

    def matrix(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Matrix:
        return CpuMatrix(self, weight, bias) if self._prepack else TorchMatrix(self, weight, bias)

    def quantized_matrix(self, weight: QuantizedWeight, bias: torch.Tensor | None) -> Matrix | None:
        return PackedMatrix(self, weight, bias) if PackedMatrix.supports(weight) else None

    def packed_kernels(self, form: PackedForm) -> tuple[ParallelKernel, ParallelKernel]:
        """What quantises rows, and what multiplies them with weights of this form."""
        if form not in self._packed:
            compiled = compiled_packed(self._element, form)
            self._packed[form] = ParallelKernel(compiled.quantise), ParallelKernel(compiled.multiply)
        return self._packed[form]

    def experts(
        self, gate_up: torch.Tensor, down: torch.Tensor, variant: ExpertVariant = PLAIN_EXPERTS
    ) -> TorchExperts:
        return dense_experts(self, gate_up, down, variant)

    def quantized_experts(
        self, gate_up: QuantizedWeight, down: QuantizedWeight, number: int, variant: ExpertVariant = PLAIN_EXPERTS
    ) -> TorchExperts | None:
        if not PackedMatrix.supports(gate_up) or not PackedMatrix.supports(down):
            return None
        matrix = partial(PackedMatrix, self)
        gate_ups = list(map(matrix, gate_up.split(number), each_bias(variant.gate_up_bias)))
        downs = list(map(matrix, down.split(number), each_bias(variant.down_bias)))
        return TorchExperts(gate_ups, downs, variant.clamp)

    def route(self, logits: torch.Tensor, top_k: int, *, normalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
        return self._torch.route(logits, top_k, normalize=normalize)

    def embedding(self, token_ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        self._spin_guard.check()  # each step begins here
        return F.embedding(token_ids, table)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        size = weight.shape[0]
        rows = x.numel() // size
        if not x.is_contiguous():
            return self._torch.rms_norm(x, weight, eps)
        out = torch.empty_like(x)
        self._rms_norm.run(
            x.data_ptr(), weight.data_ptr(), out.data_ptr(), rows, size, float_bits(eps), single_thread=rows <= FEW_ROWS
        )
        return out

    def rope_store(
        self,
        qkv: torch.Tensor,
        rotation: Rotation,
        target: KVCells,
        q_norm: torch.Tensor | None,
        k_norm: torch.Tensor | None,
        eps: float,
    ) -> torch.Tensor:
        tokens, (kv_heads, size) = qkv.shape[0], target.keys.shape[1:]
        if not qkv.is_contiguous():
            return self._torch.rope_store(qkv, rotation, target, q_norm, k_norm, eps)
        num_heads = qkv.shape[1] // size - 2 * kv_heads
        q = qkv.new_empty(tokens, num_heads, size)
        self._rope_store.run(
            qkv.data_ptr(),
            rotation.cos.data_ptr(),
            rotation.sin.data_ptr(),
            rotation.positions.data_ptr(),
            target.keys.data_ptr(),
            target.values.data_ptr(),
            target.cells.data_ptr(),
            q_norm.data_ptr() if q_norm is not None else 0,
            k_norm.data_ptr() if k_norm is not None else 0,
            q.data_ptr(),
            *(tokens, num_heads, kv_heads, size, rotation.cos.shape[0], target.keys.shape[0]),
            float_bits(eps),
            single_thread=tokens <= FEW_ROWS,
        )
        return q

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        tokens, width = gate_up.shape
        if not gate_up.is_contiguous():
            return self._torch.silu_mul(gate_up)
        out = gate_up.new_empty(tokens, width // 2)
        self._silu_mul.run(gate_up.data_ptr(), out.data_ptr(), tokens, width // 2, single_thread=tokens <= FEW_ROWS)
        return out

    def attend(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        page_table: torch.Tensor,
        blocks: torch.Tensor,
        page_size: int,
        window: int | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend tokens of several rows causally. q [T, heads, head_dim] contiguous -> the same shape.

        keys and values [cells, kv_heads, head_dim] contiguous; page_table [R, pages] int64 contiguous; blocks [B, 4]
        int64: row, first token in q, number of tokens (at most `max_queries`), its position. With `window` a
        token sees only the last `window` positions, its own included. `sinks` [heads] float32 are scores of no
        position, which take their share of each head's softmax. A token's result does not depend on its block.
        """
        out = torch.empty_like(q)
        _, num_heads, size = q.shape
        self._attend.run(
            *(q.data_ptr(), keys.data_ptr(), values.data_ptr(), page_table.data_ptr(), blocks.data_ptr()),
            out.data_ptr(),
            *(blocks.shape[0], self.max_queries, num_heads, keys.shape[1], size, keys.shape[0], page_size),
            *(page_table.shape[1], window or 0, 0 if sinks is None else sinks.data_ptr()),
        )
        return out


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
    """Has OpenMP's threads sleep while they wait, as long as other processes want the cores.

    A thread that waits for the others spins for 3 ms before it sleeps. On cores of its own that saves a third of a
    decode step; on cores that it shares, it spins away the time that the others need. The library shortens the wait to
    100 rounds while it has more threads than there are cores (`gomp_throttled_spin_count_var` in its env.c). So while
    the thread that computes has to queue for a core, a team of that size is held here, asleep. `close` ends that, as
    does the end of the guard.
    """

    def __init__(self) -> None:
        self.is_crowded = False
        self._team = SleepingTeam()
        self._next_look_ns = 0
        self._times = (0, 0)  # of the calling thread, at the last look
        self._differs_ns = 0  # for how long every look has spoken against `is_crowded`
        self._enabled = _SCHEDSTAT.exists() and _openmp_call() is not None
        self.close = weakref.finalize(self, self._team.release)

    def check(self) -> None:
        """Hold the team or release it, as the calling thread fared of late. Called once a step."""
        now = time.monotonic_ns()
        if now < self._next_look_ns or not self._enabled:
            return
        self._next_look_ns = now + _LOOK_INTERVAL_NS
        ran, queued = map(int, _SCHEDSTAT.read_text().split()[:2])
        ran_before, queued_before = self._times
        self._times = ran, queued
        if ran_before:
            self.judge(ran - ran_before, queued - queued_before)

    def judge(self, ran_ns: int, queued_ns: int) -> None:
        """Take in how long the thread had a core since the last look, and how long it could have run without one."""
        if ran_ns + queued_ns <= 0:  # it did not run, or is another thread than the last time
            return
        queued_share = queued_ns / (ran_ns + queued_ns)
        differs = queued_share < _QUIET_SHARE if self.is_crowded else queued_share > _CROWDED_SHARE
        self._differs_ns = self._differs_ns + ran_ns + queued_ns if differs else 0
        if self._differs_ns < (_QUIET_AFTER_NS if self.is_crowded else _CROWDED_AFTER_NS):
            return
        self.is_crowded, self._differs_ns = not self.is_crowded, 0
        if self.is_crowded:
            self._team.hold()
        else:
            self._team.release()


class SleepingTeam:
    """More OpenMP threads than there are cores, asleep between `hold` and `release`."""

    def __init__(self) -> None:
        self._released = threading.Event()
        self._leader: threading.Thread | None = None

    def hold(self) -> None:
        self._released.clear()
        self._leader = threading.Thread(target=self._lead, name="sleeping team", daemon=True)
        self._leader.start()

    def release(self) -> None:
        self._released.set()
        if self._leader is not None:
            self._leader.join()  # a team ends with the thread that leads it
            self._leader = None

    def _lead(self) -> None:
        call, nothing = _openmp_call(), ctypes.cast(ctypes.CDLL(None).free, ctypes.c_void_p).value  # frees no memory: 0
        if call is not None and nothing is not None:
            call(nothing, 0, len(os.sched_getaffinity(0)) + 1, 0)
        self._released.wait()


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
