"""Two ways to keep the memory busy between kernels: start early, and fetch ahead.

Kernels may start while the one before them still runs (programmatic dependent launch, NVIDIA Hopper and later).

A kernel launched with `pdl_launch(device)` may begin before its predecessor on the stream has ended. Until it has
called `pdl_wait` it may read only what no kernel in flight writes: weights, or what was written at least two
kernels ago. So it can fetch its weights while the predecessor's last programs drain, and launch latency disappears.
Each of ours lets its successor start only after its own wait, so at most two of them are in flight, and waiting for one
means that all before it have ended; kernels of libraries start when all before them have. Every program has to reach
`pdl_wait`: one that returns before would let its successors start too early. A kernel whose successor may read its
results before that one's own wait uses `pdl_wait_only`, and `pdl_trigger` when they are written.

And a small kernel, which leaves the memory idle, can have the first weights of the product behind it brought into the
L2 cache: `prefetch_l2`. Nobody waits for them, so they also arrive while the next kernel is being launched.
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
    """Keyword arguments of such a launch; the kernel takes PDL and hands it to `pdl_wait`."""
    return _PDL if device.type == "cuda" and _capability(device.index or 0) >= 9 else _IN_ORDER


@triton.jit
def pdl_wait(PDL: tl.constexpr):
    """Wait until every earlier kernel has ended and its writes are seen; then let the next kernel start."""
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
    """Let the next kernel start, and see what this one has written even before it waits."""
    if PDL:
        tl.inline_asm_elementwise("fence.acq_rel.gpu; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
        tl.debug_barrier()  # all threads' writes are seen before one of them says so
        gdc_launch_dependents()


@triton.jit
def prefetch_l2(weight, part, n, K_BYTES: tl.constexpr, LINES: tl.constexpr):
    """Bring the first LINES cache lines of 128 rows of a weight [n, K] into the L2 cache, from row part * 128 on."""
    row = part * _ROWS_AHEAD + tl.arange(0, _ROWS_AHEAD)
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
    """What a kernel fetches ahead: nothing where `programs` is 0."""

    weight: torch.Tensor | None
    n: int
    programs: int  # that fetch, each a part of the rows
    constants: dict[str, int]  # PREFETCH_K_BYTES and PREFETCH_LINES, which is 0 for nothing


def prefetch_of(weight: torch.Tensor | None, rows: int) -> Prefetch:
    """The first columns of `weight` [n, K], which `rows` rows are multiplied with next.

    Large products are limited by arithmetic, so nothing is fetched for them; rows of a weight begin at a cache line.
    """
    if weight is None or rows > _MAX_ROWS_AHEAD or weight.device.type != "cuda":
        return _NOTHING
    n, k_bytes = weight.shape[0], weight.shape[1] * weight.itemsize
    lines = min(_AHEAD_BYTES // (128 * n), k_bytes // 128)
    if not lines:
        return _NOTHING
    constants = {"PREFETCH_K_BYTES": k_bytes, "PREFETCH_LINES": 1 << (lines.bit_length() - 1)}
    return Prefetch(weight, n, triton.cdiv(n, _ROWS_AHEAD.value), constants)


@functools.cache
def _capability(index: int) -> int:
    return torch.cuda.get_device_capability(index)[0]


_AHEAD_BYTES = 3 << 20  # about what the memory delivers during a small kernel and a launch; measured on an H100
_MAX_ROWS_AHEAD = 512
_ROWS_AHEAD = tl.constexpr(128)  # of a weight, per program that fetches
_NOTHING = Prefetch(None, 0, 0, {"PREFETCH_K_BYTES": 0, "PREFETCH_LINES": 0})
_PDL = {"PDL": True, "launch_pdl": True}
_IN_ORDER = {"PDL": False}
