"""The gate of a SwiGLU layer, silu(gate) * up, in one pass (Shazeer, arXiv 2002.05202), beside its PyTorch twin."""

# Pointers and scalars of a Triton kernel have no Python types:
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

_BLOCK = 1024


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up [rows, 2 * size] contiguous, gate first -> silu(gate) * up [rows, size], computed in float32"""
    if not gate_up.is_contiguous():
        raise ValueError("gate_up must be contiguous")
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, size, dtype=gate_up.dtype, device=gate_up.device)
    _silu_mul_kernel[(rows, triton.cdiv(size, _BLOCK))](gate_up, out, size, BLOCK=_BLOCK, num_warps=4)
    return out


def silu_mul_reference(gate_up: torch.Tensor) -> torch.Tensor:
    """The twin of `silu_mul`."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(gate_up.dtype)


@triton.jit
def _silu_mul_kernel(gate_up, out, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = at < size
    gate = tl.load(gate_up + row * 2 * size + at, mask=there, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * size + size + at, mask=there, other=0.0).to(tl.float32)
    tl.store(out + row * size + at, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=there)
