"""The gate of a SwiGLU layer, silu(gate) * up, in one pass (Shazeer, arXiv 2002.05202), beside its PyTorch twin."""

# Pointers and scalars of a Triton kernel have no Python types:
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from mini_sglang.kernels.base import RowRms
from mini_sglang.kernels.overlap import ahead_of, await_inputs, fetch_ahead, overlapped
from mini_sglang.kernels.rms_norm import inverse_rms_of

_BLOCK = 1024
_WIDE_BLOCK = 4096  # for long rows of x, since every program reads the whole of one


def silu_mul(gate_up: torch.Tensor, *, rms: RowRms | None = None, ahead: torch.Tensor | None = None) -> torch.Tensor:
    """gate_up [rows, 2 * size] contiguous, gate first -> silu(gate) * up [rows, size], computed in float32

    `rms`: of x [rows, n], rows contiguous, by which gate and up are divided first. It is read early: what wrote x came
    before the product whose result gate_up is. `ahead` [N, K] contiguous: the weight that is needed next.
    """
    if not gate_up.is_contiguous():
        raise ValueError("gate_up must be contiguous")
    if rms is not None and rms.x.stride(1) != 1:
        raise ValueError("the elements of a row of x must be contiguous")
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, size, dtype=gate_up.dtype, device=gate_up.device)
    block = _BLOCK if rms is None or rms.x.shape[1] <= 2 * _BLOCK else _WIDE_BLOCK
    blocks = triton.cdiv(size, block)
    fetched = ahead_of(ahead, rows)
    _silu_mul_kernel[(rows * blocks + fetched.programs,)](
        gate_up,
        out,
        fetched.weight,
        None if rms is None else rms.x,
        rows * blocks,
        fetched.n,
        0 if rms is None else rms.x.stride(0),
        0.0 if rms is None else rms.eps,
        SIZE=size,
        BLOCK=block,
        X_SIZE=0 if rms is None else rms.x.shape[1],
        X_BLOCK=0 if rms is None else triton.next_power_of_2(rms.x.shape[1]),
        num_warps=4 if block == _BLOCK else 8,
        **fetched.constants,
        **overlapped(gate_up.device),
    )
    return out


def silu_mul_reference(gate_up: torch.Tensor, *, rms: RowRms | None = None) -> torch.Tensor:
    """The twin of `silu_mul`."""
    wide = gate_up.float()
    gate, up = (wide if rms is None else rms.divide(wide)).chunk(2, dim=-1)
    return (F.silu(gate) * up).to(gate_up.dtype)


@triton.jit(do_not_specialize=["programs", "n"])
def _silu_mul_kernel(
    gate_up,
    out,
    ahead,
    x,
    programs,
    n,
    x_stride,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    X_SIZE: tl.constexpr,
    X_BLOCK: tl.constexpr,
    AHEAD_K_BYTES: tl.constexpr,
    AHEAD_LINES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    BLOCKS: tl.constexpr = tl.cdiv(SIZE, BLOCK)
    program = tl.program_id(0)
    if AHEAD_LINES > 0:  # noqa: SIM102 (decided when the kernel is compiled)
        if program >= programs:
            fetch_ahead(ahead, program - programs, n, AHEAD_K_BYTES, AHEAD_LINES)
    row = (program // BLOCKS).to(tl.int64)
    at = program % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    there = at < tl.where(program < programs, SIZE, 0)
    if x is not None:
        inverse_rms = inverse_rms_of(x + row * x_stride, program < programs, eps, X_SIZE, X_BLOCK)
    await_inputs(OVERLAP)
    gate = tl.load(gate_up + row * 2 * SIZE + at, mask=there, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * SIZE + SIZE + at, mask=there, other=0.0).to(tl.float32)
    if x is not None:
        gate *= inverse_rms
        up *= inverse_rms
    tl.store(out + row * SIZE + at, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=there)
