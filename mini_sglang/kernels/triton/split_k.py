"""Split-K: a product of few rows is cut along K, so that every multiprocessor has work, and its partial sums added up.

The order of additions depends on the number of slices, and with it on the number of rows. Beside its PyTorch twin.
"""

# Pointers and scalars of a Triton kernel have no Python types:
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from mini_sglang.kernels.triton.pdl import pdl_launch, pdl_wait

_PROGRAMS = 256  # two for each multiprocessor of an H200: one waits for memory while another multiplies
_MOST = 8
_LEAST_DEPTH = 512  # of a slice, below which it takes longer to begin than to multiply
_BLOCK = 512


def num_splits(programs: int, depth: int) -> int:
    """Into how many slices of K a product of this many tiles is cut."""
    return max(1, min(_MOST, _PROGRAMS // max(programs, 1), depth // _LEAST_DEPTH))


def sum_partials(
    partials: torch.Tensor,
    out: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    *,
    gated: bool = False,
) -> torch.Tensor:
    """partials [splits, rows, N] float32, contiguous, added up, plus bias [N] and residual -> out [rows, N]

    `gated`: silu(first half) * second half of the sums -> out [rows, N / 2]. `residual` may be `out`.
    """
    splits, rows, columns = partials.shape
    width = columns // 2 if gated else columns
    _sum_partials_kernel[(rows, triton.cdiv(width, _BLOCK))](
        partials,
        bias,
        residual,
        out,
        rows,
        WIDTH=width,
        SPLITS=splits,
        GATED=gated,
        BLOCK=_BLOCK,
        num_warps=4,
        **pdl_launch(out.device),
    )
    return out


def sum_partials_reference(
    partials: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    *,
    gated: bool = False,
) -> torch.Tensor:
    """The twin of `sum_partials`, in float64; it leaves `residual` as it is."""
    sums = partials.double().sum(0)
    for addend in (bias, residual):
        if addend is not None:
            sums += addend.double()
    if gated:
        gate, up = sums.chunk(2, dim=-1)
        sums = F.silu(gate) * up
    return sums


@triton.jit(do_not_specialize=["rows"])
def _sum_partials_kernel(
    partials,
    bias,
    residual,
    out,
    rows,
    WIDTH: tl.constexpr,
    SPLITS: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    COLUMNS: tl.constexpr = 2 * WIDTH if GATED else WIDTH
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    valid = column < WIDTH
    pdl_wait(PDL)
    acc = tl.zeros([BLOCK], tl.float32)
    up = tl.zeros([BLOCK], tl.float32)
    for split in tl.static_range(SPLITS):
        places = partials + (split * rows + row) * COLUMNS + column
        acc += tl.load(places, mask=valid, other=0.0)
        if GATED:
            up += tl.load(places + WIDTH, mask=valid, other=0.0)
    if bias is not None:
        acc += tl.load(bias + column, mask=valid, other=0.0).to(tl.float32)
        if GATED:
            up += tl.load(bias + WIDTH + column, mask=valid, other=0.0).to(tl.float32)
    if GATED:
        acc = acc * tl.sigmoid(acc) * up
    if residual is not None:
        acc += tl.load(residual + row * WIDTH + column, mask=valid, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + column, acc.to(out.dtype.element_ty), mask=valid)
