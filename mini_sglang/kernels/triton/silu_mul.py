"""The gate of a SwiGLU layer, silu(gate) * up, in one pass (Shazeer, arXiv 2002.05202), beside its PyTorch twin.

Further programs prefetch the next matrix product's weights. Knows no model.
"""

# Pointers and scalars of a Triton kernel have no Python types:
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from mini_sglang.kernels.triton.pdl import pdl_launch, pdl_wait, prefetch_l2, prefetch_of

_BLOCK = 1024


def silu_mul(gate_up: torch.Tensor, *, prefetch: torch.Tensor | None = None) -> torch.Tensor:
    """gate_up [rows, 2 * size] contiguous, gate first -> silu(gate) * up [rows, size], computed in float32

    `prefetch` [N, K] contiguous: the weight that is needed next. Raises ValueError if gate_up is not contiguous.
    """
    if not gate_up.is_contiguous():
        raise ValueError("gate_up must be contiguous")
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, size, dtype=gate_up.dtype, device=gate_up.device)
    blocks = triton.cdiv(size, _BLOCK)
    fetched = prefetch_of(prefetch, rows)
    _silu_mul_kernel[(rows * blocks + fetched.programs,)](
        gate_up,
        out,
        fetched.weight,
        rows * blocks,
        fetched.n,
        SIZE=size,
        BLOCK=_BLOCK,
        num_warps=4,
        **fetched.constants,
        **pdl_launch(gate_up.device),
    )
    return out


def silu_mul_reference(gate_up: torch.Tensor) -> torch.Tensor:
    """The twin of `silu_mul`."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(gate_up.dtype)


@triton.jit(do_not_specialize=["programs", "n"])
def _silu_mul_kernel(
    gate_up,
    out,
    prefetch,
    programs,
    n,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PREFETCH_K_BYTES: tl.constexpr,
    PREFETCH_LINES: tl.constexpr,
    PDL: tl.constexpr,
):
    BLOCKS: tl.constexpr = tl.cdiv(SIZE, BLOCK)
    program = tl.program_id(0)
    if PREFETCH_LINES > 0:  # noqa: SIM102 (decided when the kernel is compiled)
        if program >= programs:
            prefetch_l2(prefetch, program - programs, n, PREFETCH_K_BYTES, PREFETCH_LINES)
    row = (program // BLOCKS).to(tl.int64)
    offsets = program % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    valid = offsets < tl.where(program < programs, SIZE, 0)
    pdl_wait(PDL)
    gate = tl.load(gate_up + row * 2 * SIZE + offsets, mask=valid, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * SIZE + SIZE + offsets, mask=valid, other=0.0).to(tl.float32)
    tl.store(out + row * SIZE + offsets, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=valid)
