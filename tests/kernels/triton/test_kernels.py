"""A matrix laid out for a GPU does what PyTorch does, for few rows and many, deterministic or not."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from mini_sglang.kernels.interface import Norm
from mini_sglang.kernels.torch_kernels import TorchKernels
from mini_sglang.kernels.triton.gemv import MAX_ROWS
from mini_sglang.kernels.triton.kernels import TritonKernels


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
        torch.testing.assert_close(actual.matmul(x, before), wanted.matmul(x, before), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(actual.gated(x, before), wanted.gated(x, before), rtol=1e-4, atol=1e-4)
    added, expected = actual.add_to(residual.clone(), x), wanted.add_to(residual.clone(), x)
    torch.testing.assert_close(added.x, expected.x, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("rows", [1, pytest.param(5, marks=pytest.mark.gpu), 16, 70])
@pytest.mark.parametrize("biased", [False, True])
def test_a_small_matrix_in_half_precision_too(
    device: torch.device, deterministic: bool, rows: int, biased: bool
) -> None:
    random = torch.Generator().manual_seed(rows)

    def tensor(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random).to(device, torch.float16)

    x, weight, bias, residual = tensor(rows, 256), tensor(96, 256) / 16, tensor(96), tensor(rows, 96)
    norm, then = Norm(tensor(256), 1e-6), Norm(tensor(96), 1e-6)
    actual = TritonKernels(deterministic=deterministic).matrix(weight, bias if biased else None)
    wanted = TorchKernels().matrix(weight.float(), bias.float() if biased else None)
    for before, in_float32 in ((None, None), (norm, Norm(norm.weight.float(), norm.eps))):
        gated = wanted.gated(x.float(), in_float32)
        torch.testing.assert_close(actual.gated(x, before).float(), gated, rtol=4e-3, atol=4e-3)
    expected = wanted.add_to(residual.float(), x.float()).x
    added = actual.add_to(residual.clone(), x, then)
    torch.testing.assert_close(added.x.float(), expected, rtol=2e-3, atol=2e-3)
    splits = not deterministic and not biased and rows > MAX_ROWS
    assert (added.normed is not None) == splits
    if added.normed is not None:
        normed = F.rms_norm(expected, (96,), then.weight.float(), then.eps)
        torch.testing.assert_close(added.normed.float(), normed, rtol=4e-3, atol=4e-3)
