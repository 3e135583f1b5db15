"""The compiled kernels compute what their PyTorch twins define, in both dtypes, for few rows and for many."""

from __future__ import annotations

import pytest
import torch

from mini_sglang.kernels.cpu.kernels import FEW_ROWS, CpuKernels
from mini_sglang.kernels.interface import KVCells, Rotation
from mini_sglang.kernels.torch_kernels import TorchKernels

DTYPES = [torch.float32, torch.bfloat16]
ROWS = [1, 5, FEW_ROWS + 1, 4 * FEW_ROWS]
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


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(4, 2, 16), (3, 1, 64), (2, 2, 128)])
@pytest.mark.parametrize("norm", [False, True])
def test_rope_store(dtype: torch.dtype, rows: int, heads: int, kv_heads: int, size: int, norm: bool) -> None:
    qkv = torch.randn(rows, (heads + 2 * kv_heads) * size).to(dtype)
    rotation = Rotation(
        torch.randn(150, size // 2).to(dtype), torch.randn(150, size // 2).to(dtype), torch.arange(rows)
    )
    q_norm, k_norm = (torch.randn(size).to(dtype), torch.randn(size).to(dtype)) if norm else (None, None)
    cells = torch.randperm(2 * rows)[:rows]

    def target() -> KVCells:
        return KVCells(
            torch.ones(2 * rows, kv_heads, size).to(dtype), torch.ones(2 * rows, kv_heads, size).to(dtype), cells
        )

    actual, expected, before = target(), target(), qkv.clone()
    q = CpuKernels(dtype).rope_store(qkv, rotation, actual, q_norm, k_norm, 1e-6)
    assert torch.equal(qkv, before)
    # the twin in float32: rounding once, as the compiled kernel does
    wide = Rotation(rotation.cos.float(), rotation.sin.float(), rotation.positions)
    wide_target = KVCells(expected.keys.float(), expected.values.float(), cells)
    wide_q_norm = None if q_norm is None else q_norm.float()
    wide_k_norm = None if k_norm is None else k_norm.float()
    expected_q = TWIN.rope_store(qkv.float(), wide, wide_target, wide_q_norm, wide_k_norm, 1e-6)
    tolerance = 4e-6 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(q.float(), expected_q, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(actual.keys.float(), wide_target.keys, atol=tolerance, rtol=tolerance)
    assert torch.equal(actual.values.float(), wide_target.values)


@pytest.mark.parametrize("rows", ROWS)
def test_silu_mul(dtype: torch.dtype, rows: int) -> None:
    gate_up = (torch.randn(rows, 2 * 90) * 5).to(dtype)
    assert_close(CpuKernels(dtype).silu_mul(gate_up), TWIN.silu_mul(gate_up.float()).to(dtype))


def test_silu_mul_of_extreme_gates(dtype: torch.dtype) -> None:
    gate = torch.tensor([[-1e4, -200.0, -90.0, -20.0, 0.0, 20.0, 90.0, 1e4]]).to(dtype)
    gate_up = torch.cat((gate, torch.ones_like(gate)), -1)
    assert_close(CpuKernels(dtype).silu_mul(gate_up), TWIN.silu_mul(gate_up))
