"""Which matrix products of few rows our kernels compute and which the library does, with K whole or split."""

from __future__ import annotations

import pytest
import torch

from mini_sglang.kernels.triton.matmul import matmul_reference
from mini_sglang.kernels.triton.small_gemm import gated_tile, split_k_matmul

SMALL, LARGE = (6144, 1024), (24576, 4096)  # gate and up of Qwen3-0.6B and Qwen3-8B


def weight(n: int, k: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(n, k, dtype=dtype, device="meta")


@pytest.mark.parametrize("rows", [3, 15, 16, 63, 64, 130, 256])
def test_our_kernel_computes_the_gated_products_of_a_small_model(rows: int) -> None:
    assert gated_tile(rows, weight(*SMALL)) is not None


def test_our_kernel_computes_a_large_gated_product_only_for_few_rows() -> None:
    assert gated_tile(16, weight(*LARGE)) is not None
    for rows in (17, 64, 256):
        assert gated_tile(rows, weight(*LARGE)) is None


def test_the_library_computes_products_of_many_rows() -> None:
    assert gated_tile(257, weight(*SMALL)) is None
    assert split_k_matmul(torch.empty(257, 2048, device="meta"), weight(1024, 2048)) is None


@pytest.mark.parametrize("unsupported", [weight(1024, 1024, torch.float32), weight(1024, 1000)])
def test_the_library_computes_what_tensor_cores_or_tma_cannot(unsupported: torch.Tensor) -> None:
    assert gated_tile(16, unsupported) is None
    assert split_k_matmul(torch.empty(16, unsupported.shape[1], device="meta"), unsupported) is None


def num_splits(rows: int, n: int, k: int, device: torch.device) -> int:
    """How many partial sums `split_k_matmul` gives, 1 if it leaves K whole; checks what they add up to."""
    random = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, k, generator=random).to(device, torch.float16)
    narrow = torch.randn(n, k, generator=random).to(device, torch.float16)
    partials = split_k_matmul(x, narrow)
    if partials is None:
        return 1
    assert partials.shape[1:] == (rows, n)
    wanted = matmul_reference(x.double(), narrow.double())
    assert float((partials.double().sum(0) - wanted).norm() / wanted.norm()) < 1e-5
    return len(partials)


@pytest.mark.parametrize(
    ("rows", "n", "k", "wanted_splits"), [(16, 64, 512, 8), (17, 1024, 512, 8), (65, 2112, 256, 3)]
)
def test_a_narrow_product_is_split_to_keep_the_device_busy(
    device: torch.device, rows: int, n: int, k: int, wanted_splits: int
) -> None:
    assert num_splits(rows, n, k, device) == wanted_splits


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rows", "n", "k", "wanted_splits"),
    [(5, 1024, 2048, 2), (5, 4096, 4096, 2), (200, 2048, 8192, 2), (130, 4096, 12288, 2), (64, 4096, 12288, 1)],
)
def test_the_library_computes_two_halves_of_k(
    device: torch.device, rows: int, n: int, k: int, wanted_splits: int
) -> None:
    assert num_splits(rows, n, k, device) == wanted_splits
