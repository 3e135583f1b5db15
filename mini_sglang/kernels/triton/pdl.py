"""Programmatic dependent launch and L2 prefetch: two ways to keep the memory busy between kernels.

Programmatic dependent launch (PDL, NVIDIA Hopper and later): a kernel launched with `pdl_launch(device)` may begin
before its predecessor on the stream has ended. Until it has called `pdl_wait` it may read only what no kernel in flight
writes: weights, or what was written at least two kernels ago. So it can load its weights while the predecessor's last
programs drain, and launch latency disappears. Each of our kernels lets its successor start only after its own wait. So
at most two of them are in flight, and when a wait returns, all earlier kernels have ended; kernels of libraries start
when all earlier ones have. Every program has to reach `pdl_wait`: one that returned before it would let its successors
start too early. A kernel whose successor may read its results before the successor waits uses `pdl_wait_only`, and
`pdl_trigger` when they are written.

L2 prefetch: a small kernel, which leaves the memory idle, can bring the first weights of the next matrix product into
the L2 cache (`prefetch_l2`). No kernel waits for them, so they also arrive while the next kernel is being launched.
"""

# Pointers and scalars of a Triton kernel have no Python types:
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


def pdl_launch(device: torch.device) -> dict[str, bool]:
    """Keyword arguments that launch a kernel this way; the kernel takes PDL and passes it to `pdl_wait`."""
    return _PDL if device.type == "cuda" and _capability(device.index or 0) >= 9 else _NO_PDL


@triton.jit
def pdl_wait(PDL: tl.constexpr):
    """Wait until every earlier kernel has ended and its writes are visible; then let the next kernel start."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def pdl_wait_only(PDL: tl.constexpr):
    """Wait as `pdl_wait` does, but let the next kernel start no earlier than `pdl_trigger`."""
    if PDL:
        gdc_wait()


@triton.jit
def pdl_trigger(PDL: tl.constexpr):
    """Let the next kernel start, and make this kernel's writes visible to it even before it waits."""
    if PDL:
        tl.inline_asm_elementwise("fence.acq_rel.gpu; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
        tl.debug_barrier()  # all threads' writes are visible before one of them triggers
        gdc_launch_dependents()


@triton.jit
def prefetch_l2(weight, part, n, K_BYTES: tl.constexpr, LINES: tl.constexpr):
    """Bring the first LINES cache lines of 128 rows of a weight [n, K] into the L2 cache, from row part * 128 on."""
    row = part * _ROWS_PER_PROGRAM + tl.arange(0, _ROWS_PER_PROGRAM)
    places = tl.minimum(row, n - 1).to(tl.int64)[:, None] * K_BYTES + tl.arange(0, LINES)[None, :] * 128
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [weight.to(tl.int64) + places],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


class Prefetch(NamedTuple):
    """What a kernel prefetches into the L2 cache; nothing if `programs` is 0."""

    weight: torch.Tensor | None
    n: int
    programs: int  # additional ones, each of which prefetches a part of the rows
    constants: dict[str, int]  # PREFETCH_K_BYTES and PREFETCH_LINES; 0 lines for nothing


def prefetch_of(weight: torch.Tensor | None, rows: int) -> Prefetch:
    """The first columns of `weight` [n, K], which `rows` rows are multiplied with next.

    A product of many rows is limited by arithmetic, so nothing is prefetched for it. Each row of a weight begins at a
    cache line.
    """
    if weight is None or rows > _MAX_ROWS or weight.device.type != "cuda":
        return _NO_PREFETCH
    n, k_bytes = weight.shape[0], weight.shape[1] * weight.itemsize
    lines = min(_PREFETCH_BYTES // (128 * n), k_bytes // 128)
    if not lines:
        return _NO_PREFETCH
    constants = {"PREFETCH_K_BYTES": k_bytes, "PREFETCH_LINES": 1 << (lines.bit_length() - 1)}
    return Prefetch(weight, n, triton.cdiv(n, _ROWS_PER_PROGRAM.value), constants)


@functools.cache
def _capability(index: int) -> int:
    return torch.cuda.get_device_capability(index)[0]


_PREFETCH_BYTES = 3 << 20  # about what the memory delivers during a small kernel and a launch; measured on an H100
_MAX_ROWS = 512
_ROWS_PER_PROGRAM = tl.constexpr(128)  # of a weight
_NO_PREFETCH = Prefetch(None, 0, 0, {"PREFETCH_K_BYTES": 0, "PREFETCH_LINES": 0})
_PDL = {"PDL": True, "launch_pdl": True}
_NO_PDL = {"PDL": False}
