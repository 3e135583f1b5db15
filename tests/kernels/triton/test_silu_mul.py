"""The fused gate equals its twin."""

from __future__ import annotations

import pytest
import torch

from mini_sglang.kernels.triton.silu_mul import silu_mul, silu_mul_reference


@pytest.mark.parametrize(
    ("dtype", "tolerance", "rows", "size"),
    [
        (torch.float32, 2e-6, 3, 100),
        (torch.float32, 2e-6, 1, 1536),
        (torch.float16, 1e-3, 2, 1024),
        pytest.param(torch.bfloat16, 5e-3, 257, 12288, marks=pytest.mark.gpu),
    ],
)
def test_equals_float64(device: torch.device, dtype: torch.dtype, tolerance: float, rows: int, size: int) -> None:
    torch.manual_seed(0)
    gate_up = torch.randn(rows, 2 * size).to(device, dtype)
    gate, up = gate_up.double().chunk(2, dim=-1)
    wanted = gate * gate.sigmoid() * up
    for out in (silu_mul(gate_up), silu_mul_reference(gate_up)):
        assert out.dtype == dtype
        assert (out.double() - wanted).norm() / wanted.norm() < tolerance
