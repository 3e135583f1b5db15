"""RMSNorm fused with the residual addition before it (Zhang and Sennrich, arXiv 1910.07467).

One pass over device memory where an addition and a norm would take two. One program per row and a fixed tile, so a
row's result depends on that row alone. Each kernel stands beside its PyTorch twin; neither knows a model.
"""

# Pointers and scalars of a Triton kernel have no Python types:
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [rows, size], rows contiguous, weight [size] -> x / rms(x) * weight, computed in float32, in x's dtype"""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, None, weight, out, eps)
    return out


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Add x to `residual` in place, then return the norm of the sum, as it was rounded to the residual's dtype.

    x and residual [rows, size], rows contiguous, of one dtype; weight [size]. Returns [rows, size].
    """
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, residual, weight, out, eps)
    return out


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The twin of `rms_norm`."""
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def add_rms_norm_reference(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The twin of `add_rms_norm`: writes the residual too."""
    return rms_norm_reference(residual.add_(x), weight, eps)


def _launch(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, out: torch.Tensor, eps: float
) -> None:
    rows, size = x.shape
    if x.stride(1) != 1 or (residual is not None and residual.stride(1) != 1):
        raise ValueError("the elements of a row must be contiguous")
    block = triton.next_power_of_2(size)
    _norm_kernel[(rows,)](
        x,
        x if residual is None else residual,
        weight,
        out,
        x.stride(0),
        x.stride(0) if residual is None else residual.stride(0),
        eps,
        SIZE=size,
        BLOCK=block,
        ADD=residual is not None,
        num_warps=max(1, min(16, block // 512)),
    )


@triton.jit
def _norm_kernel(
    x,
    residual,
    weight,
    out,
    x_stride,
    residual_stride,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    there = at < SIZE
    scale = tl.load(weight + at, mask=there, other=0.0).to(tl.float32)
    values = tl.load(x + row * x_stride + at, mask=there, other=0.0).to(tl.float32)
    if ADD:
        values += tl.load(residual + row * residual_stride + at, mask=there, other=0.0).to(tl.float32)
        rounded = values.to(residual.dtype.element_ty)
        tl.store(residual + row * residual_stride + at, rounded, mask=there)
        values = rounded.to(tl.float32)
    inverse_rms = tl.rsqrt(tl.sum(values * values, 0) / SIZE + eps)
    tl.store(out + row * SIZE + at, (values * inverse_rms * scale).to(out.dtype.element_ty), mask=there)
