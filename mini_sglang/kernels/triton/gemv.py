"""Matrix products with one or two rows (GEMV), limited by how fast the weights can be read.

A decode step of one request reads every weight once and does next to nothing with it. So one launch computes all that
lies between two matrix products too: the norm before, the gate or the residual after. It loads its first weights while
the previous kernel still runs (`pdl.py`). The kernel stands beside its PyTorch twin.

A program computes BLOCK_N outputs (twice as many with a gate) and walks along K, loading the next tiles ahead.
"""

# Pointers and scalars of a Triton kernel have no Python types:
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from mini_sglang.kernels.interface import Norm
from mini_sglang.kernels.triton.pdl import pdl_launch, pdl_wait

MAX_ROWS = 2  # more rows are faster on tensor cores, despite their additional launches


@dataclass(frozen=True)
class GemvTuning:
    """How the matrix is cut into tiles, and how many warps a program has."""

    block_n: int  # outputs of a tile
    block_k: int  # inputs of a tile
    num_warps: int = 1
    ahead: int = 1  # tiles that are loaded ahead: 1 or 2


def gemv_tuning(n: int, k: int, *, normed: bool, gated: bool) -> GemvTuning:
    """The fastest tuning, measured on an H200 in bfloat16.

    A program of one warp needs no barrier to add up. Where a few warps' registers hold whole rows, all of a small
    matrix is being loaded before the inputs are ready.
    """
    whole = triton.next_power_of_2(k)
    if k <= 1024:
        return GemvTuning(block_n=2, block_k=512) if gated else GemvTuning(block_n=4, block_k=whole)
    if gated:
        return GemvTuning(block_n=8, block_k=256) if k <= 4096 else GemvTuning(block_n=2, block_k=1024, ahead=2)
    if n > 32768:  # a vocabulary
        return GemvTuning(block_n=8, block_k=512)
    if normed:
        return GemvTuning(block_n=2, block_k=512) if k <= 4096 else GemvTuning(block_n=4, block_k=512, ahead=2)
    if k <= 4096 and n <= 2048:
        return GemvTuning(block_n=4, block_k=whole, num_warps=4)
    return GemvTuning(block_n=2 if n <= 4096 else 4, block_k=1024, num_warps=1 if k <= 8192 else 2)


def gemv(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    norm: Norm | None = None,
    gated: bool = False,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    tuning: GemvTuning | None = None,
) -> torch.Tensor:
    """x W^T in float32, with RMSNorm of x before it and bias, gate or residual after it, if they are given.

    x [rows, K], rows contiguous, at most MAX_ROWS; weight [N, K] contiguous; bias [N]; norm: K wide; with `gated` the
    result is silu(first half) * second half of the N outputs; residual [rows, N] is added in place and returned.
    -> [rows, N], or [rows, N / 2] with `gated`, in x's dtype; without a residual in `out`, if that is given.
    Raises ValueError for more rows or other layouts.
    """
    rows, k = x.shape
    n = weight.shape[0] // 2 if gated else weight.shape[0]
    if rows > MAX_ROWS:
        raise ValueError(f"gemv takes at most {MAX_ROWS} rows, got {rows}")
    if x.stride(1) != 1 or not weight.is_contiguous():
        raise ValueError("the rows of x and the whole weight must be contiguous")
    if residual is not None:
        out = residual
    if out is None:
        out = torch.empty(rows, n, dtype=x.dtype, device=x.device)
    elif not out.is_contiguous():
        raise ValueError("the residual and `out` must be contiguous")
    tuning = tuning or gemv_tuning(n, k, normed=norm is not None, gated=gated)
    _gemv_kernel[(triton.cdiv(n, tuning.block_n),)](
        x,
        weight,
        weight if bias is None else bias,
        weight if norm is None else norm.weight,
        out,
        x.stride(0),
        rows,
        0.0 if norm is None else norm.eps,
        N=n,
        K=k,
        ROWS=triton.next_power_of_2(rows),
        BLOCK_N=tuning.block_n,
        BLOCK_K=tuning.block_k,
        BIAS=bias is not None,
        NORM=norm is not None,
        GATED=gated,
        RESIDUAL=residual is not None,
        AHEAD=tuning.ahead,
        num_warps=tuning.num_warps,
        **pdl_launch(x.device),
    )
    return out


def gemv_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    norm: Norm | None = None,
    gated: bool = False,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """The twin of `gemv`, in float64; it leaves `residual` as it is."""
    values = x.double()
    if norm is not None:
        values = F.rms_norm(values, (x.shape[1],), norm.weight.double(), norm.eps)
    out = F.linear(values, weight.double(), None if bias is None else bias.double())
    if gated:
        gate, up = out.chunk(2, dim=-1)
        out = F.silu(gate) * up
    return (out if residual is None else out + residual.double()).to(x.dtype)


@triton.jit
def _gemv_kernel(
    x,
    weight,
    bias,
    norm,
    out,
    x_stride,
    rows,
    eps,
    N: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BIAS: tl.constexpr,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    RESIDUAL: tl.constexpr,
    AHEAD: tl.constexpr,
    PDL: tl.constexpr,
):
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.arange(0, ROWS)
    offsets = tl.arange(0, BLOCK_K)
    first = weight + outputs.to(tl.int64)[:, None] * K + offsets[None, :]
    second = first + N * K  # of the up half, with GATED
    valid = (outputs < N)[:, None]
    inner = valid & (offsets < K)[None, :]
    tile = tl.load(first, mask=inner, other=0.0)
    tile_up = tl.load(second, mask=inner, other=0.0) if GATED else tile
    if AHEAD > 1:
        inner = valid & (BLOCK_K + offsets < K)[None, :]
        waiting = tl.load(first + BLOCK_K, mask=inner, other=0.0)
        waiting_up = tl.load(second + BLOCK_K, mask=inner, other=0.0) if GATED else waiting
    if NORM and K <= BLOCK_K:
        scale = tl.load(norm + offsets, mask=offsets < K, other=0.0).to(tl.float32)
    places = out + (row * N)[:, None] + outputs[None, :]
    mask = (row < rows)[:, None] & (outputs < N)[None, :]
    pdl_wait(PDL)
    if RESIDUAL:  # loaded together with x, not after the sums
        addend = tl.load(places, mask=mask, other=0.0).to(tl.float32)
    acc = tl.zeros([ROWS, BLOCK_N], tl.float32)
    acc_up = tl.zeros([ROWS, BLOCK_N], tl.float32)
    squares = tl.zeros([ROWS], tl.float32)
    for k in range(0, K, BLOCK_K):
        inside = k + offsets < K
        # x is loaded in the layout of the tile, whose inner dimension is K
        values = tl.load(
            x + (row * x_stride)[:, None] + (k + offsets)[None, :],
            mask=(row < rows)[:, None] & inside[None, :],
            other=0.0,
        ).to(tl.float32)
        if NORM:
            squares += tl.sum(values * values, 1)
            if K > BLOCK_K:
                scale = tl.load(norm + k + offsets, mask=inside, other=0.0).to(tl.float32)
            values *= scale[None, :]
        ahead = k + AHEAD * BLOCK_K
        inner = valid & (ahead + offsets < K)[None, :]
        coming = tl.load(first + ahead, mask=inner, other=0.0)
        acc += tl.sum(values[:, None, :] * tile.to(tl.float32)[None, :, :], 2)
        tile = coming
        if AHEAD > 1:
            tile = waiting
            waiting = coming
        if GATED:
            coming_up = tl.load(second + ahead, mask=inner, other=0.0)
            acc_up += tl.sum(values[:, None, :] * tile_up.to(tl.float32)[None, :, :], 2)
            tile_up = coming_up
            if AHEAD > 1:
                tile_up = waiting_up
                waiting_up = coming_up
    if NORM:
        inverse_rms = tl.rsqrt(squares / K + eps)[:, None]
        acc *= inverse_rms
        acc_up *= inverse_rms
    if BIAS:
        acc += tl.load(bias + outputs, mask=outputs < N, other=0.0).to(tl.float32)[None, :]
    if GATED:
        if BIAS:
            acc_up += tl.load(bias + N + outputs, mask=outputs < N, other=0.0).to(tl.float32)[None, :]
        acc = acc / (1.0 + tl.exp(-acc)) * acc_up
    if RESIDUAL:
        acc += addend
    tl.store(places, acc.to(out.dtype.element_ty), mask=mask)
