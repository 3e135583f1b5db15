"""Products of a few rows, by ours and by the library, whole and in parts."""

from __future__ import annotations

import pytest
import torch

from mini_sglang.kernels.triton.matmul import matmul_reference
from mini_sglang.kernels.triton.small_gemm import gated_tile, split_k_matmul

SMALL, LARGE = (6144, 1024), (24576, 4096)  # gate and up of Qwen3-0.6B and Qwen3-8B


def weight(n: int, k: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(n, k, dtype=dtype, device="meta")


@pytest.mark.parametrize("rows", [3, 15, 16, 63, 64, 130, 256])
def test_gates_of_a_small_model_are_ours(rows: int) -> None:
    assert gated_tile(rows, weight(*SMALL)) is not None


def test_of_a_large_model_only_those_of_very_few_rows_are() -> None:
    assert gated_tile(16, weight(*LARGE)) is not None
    for rows in (17, 64, 256):
        assert gated_tile(rows, weight(*LARGE)) is None


def test_of_many_rows_none_is() -> None:
    assert gated_tile(257, weight(*SMALL)) is None
    assert split_k_matmul(torch.empty(257, 2048, device="meta"), weight(1024, 2048)) is None


@pytest.mark.parametrize("unfit", [weight(1024, 1024, torch.float32), weight(1024, 1000)])
def test_what_the_tensor_cores_or_the_memory_engine_cannot_take_is_the_librarys(unfit: torch.Tensor) -> None:
    assert gated_tile(16, unfit) is None
    assert split_k_matmul(torch.empty(16, unfit.shape[1], device="meta"), unfit) is None


def in_parts(rows: int, n: int, k: int, device: torch.device) -> int:
    """Checks their sum; how many there are, 1 for a product that is left whole."""
    random = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, k, generator=random).to(device, torch.float16)
    narrow = torch.randn(n, k, generator=random).to(device, torch.float16)
    parts = split_k_matmul(x, narrow)
    if parts is None:
        return 1
    assert parts.shape[1:] == (rows, n)
    wanted = matmul_reference(x.double(), narrow.double())
    assert float((parts.double().sum(0) - wanted).norm() / wanted.norm()) < 1e-5
    return len(parts)


@pytest.mark.parametrize(("rows", "n", "k", "number"), [(16, 64, 512, 8), (17, 1024, 512, 8), (65, 2112, 256, 3)])
def test_a_narrow_product_is_cut_into_as_many_as_keep_the_device_busy(
    device: torch.device, rows: int, n: int, k: int, number: int
) -> None:
    assert in_parts(rows, n, k, device) == number


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rows", "n", "k", "number"),
    [(5, 1024, 2048, 2), (5, 4096, 4096, 2), (200, 2048, 8192, 2), (130, 4096, 12288, 2), (64, 4096, 12288, 1)],
)
def test_the_library_computes_two_halves(device: torch.device, rows: int, n: int, k: int, number: int) -> None:
    assert in_parts(rows, n, k, device) == number
