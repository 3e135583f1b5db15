"""RMSNorm (Zhang and Sennrich, arXiv 1910.07467), beside its PyTorch twin.

The matrix product before the norm adds the residual itself, unless it leaves partial sums (`matmul_partials`): those
are added up here. One program per row and a fixed tile, so a row's result depends on that row alone; further programs
prefetch the next product's weights. Knows no model.
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
    partials: torch.Tensor | None = None,
    prefetch: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [rows, size], rows contiguous, weight [size] -> x / rms(x) * weight, computed in float32, in x's dtype

    `partials` [P, rows, size] float32, contiguous, are added to x first, in place.
    `prefetch` [N, K] contiguous: the weight that is needed next.
    Raises ValueError if the elements of a row are not contiguous.
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
        partials,
        out,
        fetched.weight,
        rows,
        0 if partials is None else len(partials),
        fetched.n,
        x.stride(0),
        eps,
        SIZE=size,
        BLOCK=block,
        PARTIALS=1 if partials is None else triton.next_power_of_2(len(partials)),
        num_warps=max(1, min(16, block // (512 if partials is None else 128))),
        **fetched.constants,
        **pdl_launch(x.device),
    )
    return out


def rms_norm_reference(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, partials: torch.Tensor | None = None
) -> torch.Tensor:
    """The twin of `rms_norm`."""
    if partials is not None:
        x.copy_((x.float() + partials.sum(0)).to(x.dtype))
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


@triton.jit(do_not_specialize=["rows", "num_partials", "n"])
def _norm_kernel(
    x,
    weight,
    partials,
    out,
    prefetch,
    rows,
    num_partials,
    n,
    x_stride,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTIALS: tl.constexpr,
    PREFETCH_K_BYTES: tl.constexpr,
    PREFETCH_LINES: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if PREFETCH_LINES > 0:  # noqa: SIM102 (decided when the kernel is compiled)
        if row >= rows:
            prefetch_l2(prefetch, tl.program_id(0) - rows, n, PREFETCH_K_BYTES, PREFETCH_LINES)
    offsets = tl.arange(0, BLOCK)
    valid = offsets < tl.where(row < rows, SIZE, 0)
    scale = tl.load(weight + offsets, mask=valid, other=0.0).to(tl.float32)
    pdl_wait(PDL)
    values = tl.load(x + row * x_stride + offsets, mask=valid, other=0.0).to(tl.float32)
    if partials is not None:
        partial = tl.arange(0, PARTIALS)[:, None]  # all are loaded at once
        places = (partial * rows + row) * SIZE + offsets[None, :]
        values += tl.sum(tl.load(partials + places, mask=(partial < num_partials) & valid[None, :], other=0.0), 0)
        summed = values.to(x.dtype.element_ty)
        tl.store(x + row * x_stride + offsets, summed, mask=valid)
        values = summed.to(tl.float32)
    inverse_rms = tl.rsqrt(tl.sum(values * values, 0) / SIZE + eps)
    tl.store(out + row * SIZE + offsets, (values * inverse_rms * scale).to(out.dtype.element_ty), mask=valid)
