"""The compiled kernels compute what their PyTorch twins define, in both dtypes, for few rows and for many."""

from __future__ import annotations

import pytest
import torch

from mini_sglang.kernels.base import TorchKernels
from mini_sglang.kernels.cpu_kernels import MAX_ROWS, CpuKernels

DTYPES = [torch.float32, torch.bfloat16]
ROWS = [1, 5, MAX_ROWS + 1]
TWIN = TorchKernels()


@pytest.fixture(params=DTYPES, ids=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    torch.manual_seed(0)
    dtype: torch.dtype = request.param
    return dtype


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = 2e-6 if actual.dtype == torch.float32 else 1e-2  # bfloat16: one unit in the last place
    assert actual.dtype == expected.dtype
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("rows", ROWS)
def test_rms_norm(dtype: torch.dtype, rows: int) -> None:
    x, weight = (torch.randn(rows, 100) * 3).to(dtype), torch.randn(100).to(dtype)
    assert_close(CpuKernels(dtype).rms_norm(x, weight, 1e-5), TWIN.rms_norm(x, weight, 1e-5))


def test_rms_norm_of_heads_that_do_not_follow_each_other(dtype: torch.dtype) -> None:
    heads, weight = torch.randn(3, 6, 16).to(dtype)[:, :4], torch.randn(16).to(dtype)
    assert_close(CpuKernels(dtype).rms_norm(heads, weight, 1e-6), TWIN.rms_norm(heads, weight, 1e-6))


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("size", [16, 64, 128])
def test_rotate_a_part_of_the_fused_projection(dtype: torch.dtype, rows: int, size: int) -> None:
    heads = torch.randn(rows, 7, size).to(dtype)
    cos, sin = torch.randn(rows, 1, size).to(dtype), torch.randn(rows, 1, size).to(dtype)
    before = heads.clone()
    actual = CpuKernels(dtype).rotate(heads[:, :5], cos, sin)
    assert torch.equal(heads, before)
    expected = TWIN.rotate(heads[:, :5].float(), cos.float(), sin.float()).to(dtype)
    assert_close(actual, expected)


@pytest.mark.parametrize("rows", ROWS)
def test_silu_mul(dtype: torch.dtype, rows: int) -> None:
    gate_up = (torch.randn(rows, 2 * 90) * 5).to(dtype)
    assert_close(CpuKernels(dtype).silu_mul(gate_up), TWIN.silu_mul(gate_up.float()).to(dtype))


def test_silu_mul_of_extreme_gates(dtype: torch.dtype) -> None:
    gate = torch.tensor([[-1e4, -200.0, -90.0, -20.0, 0.0, 20.0, 90.0, 1e4]]).to(dtype)
    gate_up = torch.cat((gate, torch.ones_like(gate)), -1)
    assert_close(CpuKernels(dtype).silu_mul(gate_up), TWIN.silu_mul(gate_up))
