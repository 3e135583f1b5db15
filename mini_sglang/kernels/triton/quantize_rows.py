"""Activations in float8 for products with float8 weights: a scale for each row, or for each 128 inputs of a row.

The norm that comes before such a product is computed in the same launch. One program per row, so a row's result depends
on that row alone. Beside its PyTorch twin.
"""

# Pointers and scalars of a Triton kernel have no Python types:
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from mini_sglang.kernels.interface import FP8, FP8_MAX, Norm
from mini_sglang.kernels.triton.pdl import pdl_launch, pdl_wait, prefetch_l2, prefetch_of

GROUP = 128  # inputs that share a scale, where a row has several


def quantize_rows(
    x: torch.Tensor, norm: Norm | None = None, *, grouped: bool, prefetch: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [rows, K], rows contiguous, or its norm -> float8_e4m3fn [rows, K] and the scales [groups, rows] float32.

    q = x / scale; the largest value of a group becomes 448, the largest of float8. With `grouped` K must be a multiple
    of 128. `prefetch` [N, K] contiguous: the weight that is needed next. Raises ValueError for other layouts.
    """
    rows, k = x.shape
    if x.stride(1) != 1 or (grouped and k % GROUP):
        raise ValueError(f"rows must be contiguous, and K a multiple of {GROUP}; got {list(x.shape)}, {x.stride()}")
    q = torch.empty(rows, k, dtype=FP8, device=x.device)
    scale = torch.empty(k // GROUP if grouped else 1, rows, dtype=torch.float32, device=x.device)
    groups = triton.next_power_of_2(triton.cdiv(k, GROUP))
    fetched = prefetch_of(prefetch, rows)
    _quantize_rows_kernel[(rows + fetched.programs,)](
        x,
        None if norm is None else norm.weight,
        q,
        scale,
        fetched.weight,
        rows,
        fetched.n,
        x.stride(0),
        0.0 if norm is None else norm.eps,
        SIZE=k,
        GROUPS=groups,
        GROUP=GROUP,
        LARGEST=FP8_MAX,
        GROUPED=grouped,
        num_warps=max(1, min(16, groups // 4)),
        **fetched.constants,
        **pdl_launch(x.device),
    )
    return q, scale


def quantize_rows_reference(
    x: torch.Tensor, norm: Norm | None = None, *, grouped: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The twin of `quantize_rows`."""
    rows, k = x.shape
    values = x.float()
    if norm is not None:
        values = F.rms_norm(values, (k,), norm.weight.float(), norm.eps)
    values = values.view(rows, -1, GROUP if grouped else k)
    largest = values.abs().amax(2)
    scale = torch.where(largest > 0, largest / FP8_MAX, 1.0)
    return (values / scale[:, :, None]).to(FP8).view(rows, k), scale.t().contiguous()


@triton.jit(do_not_specialize=["rows", "n"])
def _quantize_rows_kernel(
    x,
    norm,
    q,
    scale,
    prefetch,
    rows,
    n,
    x_stride,
    eps,
    SIZE: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    LARGEST: tl.constexpr,
    GROUPED: tl.constexpr,
    PREFETCH_K_BYTES: tl.constexpr,
    PREFETCH_LINES: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if PREFETCH_LINES > 0:  # noqa: SIM102 (decided when the kernel is compiled)
        if row >= rows:
            prefetch_l2(prefetch, tl.program_id(0) - rows, n, PREFETCH_K_BYTES, PREFETCH_LINES)
    group = tl.arange(0, GROUPS)
    offsets = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    valid = offsets < tl.where(row < rows, SIZE, 0)
    if norm is not None:
        factor = tl.load(norm + offsets, mask=valid, other=0.0).to(tl.float32)
    pdl_wait(PDL)
    values = tl.load(x + row * x_stride + offsets, mask=valid, other=0.0).to(tl.float32)
    if norm is not None:
        values *= tl.rsqrt(tl.sum(tl.sum(values * values, 1), 0) / SIZE + eps) * factor
    largest = tl.max(tl.abs(values), 1)
    if not GROUPED:
        largest = tl.zeros([GROUPS], tl.float32) + tl.max(largest, 0)
    of_group = tl.where(largest > 0, largest / LARGEST, 1.0)
    quotient = tl.minimum(tl.maximum(values / of_group[:, None], -LARGEST), LARGEST)
    tl.store(q + row * SIZE + offsets, quotient.to(q.dtype.element_ty), mask=valid)
    if GROUPED:
        NUMBER: tl.constexpr = SIZE // GROUP
        tl.store(scale + group * rows + row, of_group, mask=group < tl.where(row < rows, NUMBER, 0))
    else:
        tl.store(scale + row + group, of_group, mask=group < tl.where(row < rows, 1, 0))
