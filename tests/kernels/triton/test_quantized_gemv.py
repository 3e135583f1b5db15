"""One row times a quantised weight equals the product with the dequantised one, and what is fused with it."""

from __future__ import annotations

import pytest
import torch

from mini_sglang.kernels.interface import Norm
from mini_sglang.kernels.triton.quantized_gemv import (
    QuantizedGemvTuning,
    pack,
    quantized_gemv,
    quantized_gemv_reference,
)
from mini_sglang.weights.quantized_weight import QuantizedWeight
from tests.kernels.triton.quantized import KINDS, SHAPES, packed, random_weight

TUNING = QuantizedGemvTuning(block_n=4, chunks=4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "k", "group"), SHAPES)
def test_packing_loses_nothing(kind: str, n: int, k: int, group: int) -> None:
    weight = random_weight(kind, n, k, group)
    again = pack(weight)
    assert again is not None
    assert again.shape == (n, k)
    assert again.bits == (4 if "4" in kind else 8)
    assert torch.equal(again.dense(torch.float32), weight.dense())


@pytest.mark.parametrize("columns", [40, 48])
def test_what_is_no_whole_chunks_is_left_to_others(columns: int) -> None:
    assert pack(random_weight("4 bit", 4, columns, columns)) is None
    assert pack(random_weight("int8", 4, 64, 8)) is None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "k", "group"), SHAPES)
def test_equals_float64_with_every_fused_operation(device: torch.device, kind: str, n: int, k: int, group: int) -> None:
    random = torch.Generator().manual_seed(0)
    weight = packed(kind, n, k, group, device)
    x, bias = torch.randn(1, k, generator=random).to(device), torch.randn(n, generator=random).to(device)
    residual = torch.randn(1, n, generator=random).to(device)
    norm = Norm(torch.rand(k, generator=random).to(device) + 0.5, 1e-6)
    for before in (None, norm):
        for offset in (None, bias):
            wanted = quantized_gemv_reference(x, weight, norm=before, bias=offset)
            actual = quantized_gemv(x, weight, norm=before, bias=offset, tuning=TUNING)
            torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=1e-4)
            wanted = quantized_gemv_reference(x, weight, norm=before, bias=offset, gated=True)
            actual = quantized_gemv(x, weight, norm=before, bias=offset, gated=True, tuning=TUNING)
            torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=1e-4)
    wanted = quantized_gemv_reference(x, weight, residual=residual)
    assert quantized_gemv(x, weight, residual=residual) is residual
    torch.testing.assert_close(residual, wanted, rtol=1e-4, atol=1e-4)


def test_groups_of_zeros_give_zeros(device: torch.device) -> None:
    weight = pack(QuantizedWeight(torch.zeros(4, 64, dtype=torch.uint8), torch.zeros(4, 2), torch.zeros(4, 2), 32))
    assert weight is not None
    assert not quantized_gemv(torch.ones(1, 64), weight).any()


def test_more_rows_are_refused(device: torch.device) -> None:
    with pytest.raises(ValueError, match="takes one contiguous row, got 2"):
        quantized_gemv(torch.ones(2, 64, device=device), packed("int8", 8, 64, 64, device))
