"""The norm equals its twin, with partial sums to add first and a weight to prefetch."""

from __future__ import annotations

import pytest
import torch

from mini_sglang.kernels.triton.rms_norm import rms_norm, rms_norm_reference

CASES = [
    pytest.param(torch.float32, 2e-6, 3, 100),
    pytest.param(torch.float32, 2e-6, 1, 1024),
    pytest.param(torch.float16, 2e-3, 5, 576),
    pytest.param(torch.bfloat16, 1e-2, 257, 4096, marks=pytest.mark.gpu),
    pytest.param(torch.bfloat16, 1e-2, 64, 1024, marks=pytest.mark.gpu),
]


def relative_error(actual: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((actual.double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize(("dtype", "tolerance", "rows", "size"), CASES)
def test_norm_equals_float64(device: torch.device, dtype: torch.dtype, tolerance: float, rows: int, size: int) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(rows, size + 8).to(device, dtype)[:, :size], torch.randn(size).to(device, dtype)
    wanted = rms_norm_reference(x.double(), weight.double(), 1e-5)
    assert relative_error(rms_norm(x, weight, 1e-5), wanted) < tolerance


@pytest.mark.parametrize("number", [1, 3, 8])
@pytest.mark.parametrize(("dtype", "tolerance", "rows", "size"), CASES)
def test_partial_sums_are_added_first_and_in_place(
    device: torch.device, dtype: torch.dtype, tolerance: float, rows: int, size: int, number: int
) -> None:
    torch.manual_seed(0)
    wide, weight = torch.randn(rows, size + 8).to(device, dtype), torch.randn(size).to(device, dtype)
    partials, x = torch.randn(number, rows, size).to(device), wide.clone()[:, :size]
    summed = (x.double() + partials.double().sum(0)).to(dtype)
    actual = rms_norm(x, weight, 1e-5, partials=partials)
    assert relative_error(x, summed.double()) < tolerance
    assert relative_error(actual, rms_norm_reference(summed.double(), weight.double(), 1e-5)) < tolerance
    assert torch.equal(x._base[:, size:], wide[:, size:])  # type: ignore[index]
    twin = wide.clone()[:, :size]
    assert relative_error(rms_norm_reference(twin, weight, 1e-5, partials=partials), actual.double()) < tolerance
    assert relative_error(twin, summed.double()) < tolerance


@pytest.mark.gpu
@pytest.mark.parametrize("next_weight", [(6144, 4096), (151936, 1024), (100, 96)])
def test_prefetching_a_weight_changes_no_result(device: torch.device, next_weight: tuple[int, int]) -> None:
    x, weight = torch.randn(5, 1024, device=device).bfloat16(), torch.randn(1024, device=device).bfloat16()
    fetched = torch.zeros(next_weight, dtype=torch.bfloat16, device=device)
    assert torch.equal(rms_norm(x, weight, 1e-6, prefetch=fetched), rms_norm(x, weight, 1e-6))


def test_a_row_alone_gives_the_bits_it_gives_in_a_batch(device: torch.device) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(7, 200).to(device), torch.randn(200).to(device)
    together = rms_norm(x, weight, 1e-6)
    assert torch.equal(torch.cat([rms_norm(row, weight, 1e-6) for row in x.split(1)]), together)
