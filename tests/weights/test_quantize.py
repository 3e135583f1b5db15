"""Quantising dense matrices: each weight is the nearest value of its block's grid, and blocks of zeros stay zeros."""

from __future__ import annotations

import pytest
import torch

from mini_sglang.weights.quantize import quantize_fp8

FP8_STEP = 2.0**-4  # e4m3 has 3 bits after the leading one: half a step is at most this part of the value
FP8_SMALLEST = 2.0**-9  # the step between its smallest values


def random_matrix(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_fp8_is_within_half_a_step_of_each_weight(dtype: torch.dtype) -> None:
    w = random_matrix(33, 70).to(dtype)
    stored = quantize_fp8(w)
    assert (stored.q.dtype, stored.scale.dtype) == (torch.float8_e4m3fn, torch.float32)
    assert (stored.scale.shape, stored.minimum, stored.group_size) == ((33, 1), None, 70)
    error = (stored.dense() - w.float()).abs()
    assert bool((error <= torch.maximum(w.float().abs() * FP8_STEP, stored.scale * FP8_SMALLEST / 2) * 1.0001).all())


def test_the_largest_weight_of_each_row_is_kept() -> None:
    w = random_matrix(16, 64) * torch.logspace(-30, 30, 16)[:, None]
    torch.testing.assert_close(quantize_fp8(w).dense().abs().amax(1), w.abs().amax(1), rtol=1e-6, atol=0)


@pytest.mark.parametrize("value", [0.0, 1e-45, 3e38])
def test_rows_of_zeros_and_of_extreme_values_are_numbers(value: float) -> None:
    w = random_matrix(3, 8)
    w[1] = value
    stored = quantize_fp8(w)
    assert bool(((stored.scale > 0) & stored.scale.isfinite()).all())
    torch.testing.assert_close(stored.dense()[1], w[1], rtol=1e-6, atol=1e-40)
