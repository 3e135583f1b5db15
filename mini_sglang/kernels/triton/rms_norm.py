"""RMSNorm (Zhang and Sennrich, arXiv 1910.07467), beside its PyTorch twin.

The residual is added where it is made, by the product before; but one that leaves parts (`matmul_parts`) has them added
here. One program per row and a fixed tile, so a row's result depends on that row alone; further programs fetch the next
product's weights ahead. Knows no model.
"""

# Pointers and scalars of a Triton kernel have no Python types:
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from mini_sglang.kernels.triton.pdl import pdl_launch, pdl_wait, prefetch_l2, prefetch_of


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    parts: torch.Tensor | None = None,
    prefetch: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [rows, size], rows contiguous, weight [size] -> x / rms(x) * weight, computed in float32, in x's dtype

    `parts` [P, rows, size] float32, contiguous, are added to x first, in place.
    `prefetch` [N, K] contiguous: the weight that is needed next.
    """
    rows, size = x.shape
    if x.stride(1) != 1:
        raise ValueError("the elements of a row must be contiguous")
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(size)
    fetched = prefetch_of(prefetch, rows)
    _norm_kernel[(rows + fetched.programs,)](
        x,
        weight,
        parts,
        out,
        fetched.weight,
        rows,
        0 if parts is None else len(parts),
        fetched.n,
        x.stride(0),
        eps,
        SIZE=size,
        BLOCK=block,
        PARTS=1 if parts is None else triton.next_power_of_2(len(parts)),
        num_warps=max(1, min(16, block // (512 if parts is None else 128))),
        **fetched.constants,
        **pdl_launch(x.device),
    )
    return out


def rms_norm_reference(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, parts: torch.Tensor | None = None
) -> torch.Tensor:
    """The twin of `rms_norm`."""
    if parts is not None:
        x.copy_((x.float() + parts.sum(0)).to(x.dtype))
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


@triton.jit(do_not_specialize=["rows", "num_parts", "n"])
def _norm_kernel(
    x,
    weight,
    parts,
    out,
    prefetch,
    rows,
    num_parts,
    n,
    x_stride,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    PREFETCH_K_BYTES: tl.constexpr,
    PREFETCH_LINES: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if PREFETCH_LINES > 0:  # noqa: SIM102 (decided when the kernel is compiled)
        if row >= rows:
            prefetch_l2(prefetch, tl.program_id(0) - rows, n, PREFETCH_K_BYTES, PREFETCH_LINES)
    at = tl.arange(0, BLOCK)
    there = at < tl.where(row < rows, SIZE, 0)
    scale = tl.load(weight + at, mask=there, other=0.0).to(tl.float32)
    pdl_wait(PDL)
    values = tl.load(x + row * x_stride + at, mask=there, other=0.0).to(tl.float32)
    if parts is not None:
        part = tl.arange(0, PARTS)[:, None]  # all are on their way at once
        places = (part * rows + row) * SIZE + at[None, :]
        values += tl.sum(tl.load(parts + places, mask=(part < num_parts) & there[None, :], other=0.0), 0)
        summed = values.to(x.dtype.element_ty)
        tl.store(x + row * x_stride + at, summed, mask=there)
        values = summed.to(tl.float32)
    inverse_rms = tl.rsqrt(tl.sum(values * values, 0) / SIZE + eps)
    tl.store(out + row * SIZE + at, (values * inverse_rms * scale).to(out.dtype.element_ty), mask=there)
