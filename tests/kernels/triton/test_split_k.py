"""Partial sums are added up, with what a layer does to the sum."""

from __future__ import annotations

import pytest
import torch

from mini_sglang.kernels.triton.split_k import num_splits, sum_partials, sum_partials_reference


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("gated", [False, True])
def test_equals_its_twin(device: torch.device, splits: int, gated: bool) -> None:
    random = torch.Generator().manual_seed(splits)
    partials, bias = torch.randn(splits, 5, 1040, generator=random), torch.randn(1040, generator=random)
    residual = torch.randn(5, 1040, generator=random)
    partials, bias, residual = partials.to(device), bias.to(device), residual.to(device)
    out = torch.empty(5, 520 if gated else 1040, device=device)
    wanted = sum_partials_reference(partials, bias, gated=gated).float()
    torch.testing.assert_close(sum_partials(partials, out, bias, gated=gated), wanted, rtol=1e-5, atol=1e-5)
    if not gated:
        wanted = sum_partials_reference(partials, bias, residual).float()
        torch.testing.assert_close(sum_partials(partials, residual, bias, residual), wanted, rtol=1e-5, atol=1e-5)


def test_few_tiles_are_cut_and_short_slices_avoided() -> None:
    assert num_splits(32, 12288) == 8
    assert num_splits(96, 4096) == 2
    assert num_splits(32, 1024) == 2
    assert num_splits(192, 4096) == num_splits(1000, 4096) == num_splits(1, 64) == 1
    assert num_splits(0, 4096) >= 1
