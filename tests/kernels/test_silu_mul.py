"""The fused gate equals its twin, and divides before it gates where the product has left that."""

from __future__ import annotations

import pytest
import torch

from mini_sglang.kernels.base import RowRms
from mini_sglang.kernels.silu_mul import silu_mul, silu_mul_reference

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


CASES = [
    (torch.float32, 2e-6, 3, 100),
    (torch.float32, 2e-6, 1, 1536),
    (torch.float16, 1e-3, 2, 1024),
    pytest.param(torch.bfloat16, 5e-3, 257, 12288, marks=[pytest.mark.gpu, needs_gpu]),
]


@pytest.mark.parametrize(("dtype", "tolerance", "rows", "size"), CASES)
def test_equals_float64(device: torch.device, dtype: torch.dtype, tolerance: float, rows: int, size: int) -> None:
    torch.manual_seed(0)
    gate_up = torch.randn(rows, 2 * size).to(device, dtype)
    gate, up = gate_up.double().chunk(2, dim=-1)
    wanted = gate * gate.sigmoid() * up
    for out in (silu_mul(gate_up), silu_mul_reference(gate_up)):
        assert out.dtype == dtype
        assert (out.double() - wanted).norm() / wanted.norm() < tolerance


@pytest.mark.parametrize("width", [100, 2100])  # of x: short rows, and long ones, which have wider programs
@pytest.mark.parametrize(
    ("dtype", "tolerance", "rows", "size"), [*CASES, (torch.float32, 2e-6, 2, 5000), (torch.float16, 1e-3, 2, 4100)]
)
def test_division_equals_float64(
    device: torch.device, dtype: torch.dtype, tolerance: float, rows: int, size: int, width: int
) -> None:
    torch.manual_seed(0)
    gate_up = torch.randn(rows, 2 * size).to(device, dtype)
    x = (torch.randn(rows, width + 8) * torch.arange(1, rows + 1).unsqueeze(1)).to(device, dtype)[:, :width]
    divisors = (x.double().square().mean(-1, keepdim=True) + 0.5).sqrt()
    gate, up = (gate_up.double() / divisors).chunk(2, dim=-1)
    wanted = gate * gate.sigmoid() * up
    for out in (silu_mul(gate_up, rms=RowRms(x, 0.5)), silu_mul_reference(gate_up, rms=RowRms(x, 0.5))):
        assert out.dtype == dtype
        assert (out.double() - wanted).norm() / wanted.norm() < tolerance


@pytest.mark.gpu
@needs_gpu
def test_fetching_ahead_changes_nothing(device: torch.device) -> None:
    gate_up, x = torch.randn(5, 2 * 3072, device=device).bfloat16(), torch.randn(5, 1024, device=device).bfloat16()
    fetched = torch.zeros(1024, 3072, dtype=torch.bfloat16, device=device)
    for rms in (None, RowRms(x, 1e-6)):
        assert torch.equal(silu_mul(gate_up, rms=rms, ahead=fetched), silu_mul(gate_up, rms=rms))
    silu_mul(gate_up[:0], rms=RowRms(torch.empty_like(x[:0]), 1e-6), ahead=fetched)  # reads nothing
    torch.cuda.synchronize()


def test_a_row_alone_is_divided_to_the_bits_that_it_has_in_a_batch(device: torch.device) -> None:
    torch.manual_seed(0)
    gate_up, x = torch.randn(4, 2 * 1536).to(device), torch.randn(4, 100).to(device)
    together = silu_mul(gate_up, rms=RowRms(x, 1e-6))
    alone = [silu_mul(gate_up[row : row + 1], rms=RowRms(x[row : row + 1], 1e-6)) for row in range(4)]
    assert torch.equal(torch.cat(alone), together)
