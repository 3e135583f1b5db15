"""A matrix laid out for a GPU does what PyTorch does, for few rows and many, deterministic or not."""

from __future__ import annotations

import pytest
import torch

from mini_sglang.kernels.base import Norm, TorchKernels
from mini_sglang.kernels.triton_kernels import TritonKernels


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("rows", [1, 5, 70])
@pytest.mark.parametrize("biased", [False, True])
def test_a_matrix_equals_pytorchs(device: torch.device, deterministic: bool, rows: int, biased: bool) -> None:
    random = torch.Generator().manual_seed(rows)
    x, weight = torch.randn(rows, 48, generator=random).to(device), torch.randn(80, 48, generator=random).to(device)
    bias = torch.randn(80, generator=random).to(device) if biased else None
    residual = torch.randn(rows, 80, generator=random).to(device)
    norm = Norm(torch.rand(48, generator=random).to(device) + 0.5, 1e-6)
    actual = TritonKernels(deterministic=deterministic).matrix(weight, bias)
    wanted = TorchKernels().matrix(weight, bias)
    for before in (None, norm):
        torch.testing.assert_close(actual.product(x, before), wanted.product(x, before), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(actual.gated(x, before), wanted.gated(x, before), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(
        actual.add_to(residual.clone(), x), wanted.add_to(residual.clone(), x), rtol=1e-4, atol=1e-4
    )
