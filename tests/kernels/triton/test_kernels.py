"""A matrix laid out for a GPU does what PyTorch does, for few rows and many, deterministic or not."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from mini_sglang.kernels.interface import Norm
from mini_sglang.kernels.torch_kernels import TorchKernels
from mini_sglang.kernels.triton.gemv import MAX_ROWS
from mini_sglang.kernels.triton.kernels import TritonKernels
from tests.kernels.triton.quantized import KINDS, random_weight


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


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("rows", [1, 5, 70, pytest.param(300, marks=pytest.mark.gpu)])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("group", [128, 256])
def test_a_quantised_matrix_equals_the_dequantised_one(
    device: torch.device, deterministic: bool, rows: int, kind: str, group: int
) -> None:
    random = torch.Generator().manual_seed(rows)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    weight = random_weight(kind, 96, 256, group).to(device)
    x, bias = torch.randn(rows, 256, generator=random).to(device, dtype), torch.randn(96, generator=random)
    residual = torch.randn(rows, 96, generator=random).to(device, dtype)
    norm = Norm(torch.rand(256, generator=random).to(device, dtype) + 0.5, 1e-6)
    in_float32 = Norm(norm.weight.float(), norm.eps)
    actual = TritonKernels(deterministic=deterministic).quantized_matrix(weight, bias.to(device, dtype))
    assert actual is not None
    wanted = TorchKernels().matrix(weight.dense(), bias.to(device, dtype).float())

    def check(result: torch.Tensor, expected: torch.Tensor) -> None:
        error = (result.float() - expected).norm() / expected.norm()
        # more than one row are float8 themselves if the weight is: three bits behind the point
        assert error < (0.05 if kind == "float8" and (rows > 1 or deterministic) else 0.01)

    for before, as_float32 in ((None, None), (norm, in_float32)):
        check(actual.matmul(x, before), wanted.matmul(x.float(), as_float32))
        check(actual.gated(x, before), wanted.gated(x.float(), as_float32))
    expected = wanted.add_to(residual.float(), x.float()).x
    check(actual.add_to(residual.clone(), x).x, expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_quantised_matrix_takes_no_rows(device: torch.device, deterministic: bool, kind: str) -> None:
    """As in a step that computes a part of a prompt and samples nothing."""
    matrix = TritonKernels(deterministic=deterministic).quantized_matrix(
        random_weight(kind, 96, 256, 128).to(device), None
    )
    assert matrix is not None
    x, norm = torch.empty(0, 256, device=device), Norm(torch.ones(256, device=device), 1e-6)
    assert matrix.matmul(x, norm).shape == (0, 96)
    assert matrix.gated(x, norm).shape == (0, 48)
    assert matrix.add_to(torch.empty(0, 96, device=device), x).x.shape == (0, 96)


@pytest.mark.parametrize("kind", KINDS)
def test_a_deterministic_quantised_matrix_gives_a_row_the_same_bits_in_any_batch(
    device: torch.device, kind: str
) -> None:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    x = torch.randn(70, 256, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    matrix = TritonKernels(deterministic=True).quantized_matrix(random_weight(kind, 96, 256, 128).to(device), None)
    assert matrix is not None
    together = matrix.matmul(x)
    for rows in (1, 2, 17):
        assert torch.equal(matrix.matmul(x[:rows]), together[:rows])
