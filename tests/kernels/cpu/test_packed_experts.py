"""Packed experts: near the dequantised ones, and a token has the same bits alone and in any batch."""

from __future__ import annotations

import pytest
import torch

from mini_sglang.kernels.cpu.kernels import CpuKernels
from mini_sglang.kernels.interface import Experts
from mini_sglang.kernels.torch_kernels import dense_experts
from mini_sglang.weights.quantize import quantize_fp8, quantize_int4
from mini_sglang.weights.quantized_weight import QuantizedWeight

EXPERTS, HIDDEN, SIZE, TOP_K = 5, 96, 64, 2
TOKENS = 40


def weights(group: int) -> tuple[QuantizedWeight, QuantizedWeight]:
    torch.manual_seed(0)
    gate_up = torch.randn(EXPERTS * 2 * SIZE, HIDDEN) / HIDDEN**0.5
    down = torch.randn(EXPERTS * HIDDEN, SIZE) / SIZE**0.5
    return quantize_int4(gate_up, group), quantize_int4(down, group)


def step(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """residual, x, ids and weights; nobody chooses the last expert"""
    residual, x = torch.randn(2, TOKENS, HIDDEN).to(dtype)
    ids = torch.rand(TOKENS, EXPERTS - 1).topk(TOP_K).indices.int()
    return residual, x, ids, torch.rand(TOKENS, TOP_K)


def packed(dtype: torch.dtype, group: int) -> Experts:
    kept = CpuKernels(dtype).quantized_experts(*weights(group), EXPERTS)
    assert kept is not None
    return kept


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("group", [32, 64])
def test_near_the_dequantised_experts(dtype: torch.dtype, group: int) -> None:
    kept, (residual, x, ids, shares) = packed(dtype, group), step(dtype)
    dequantised = (weight.dense().to(dtype).unflatten(0, (EXPERTS, -1)) for weight in weights(group))
    zeros = torch.zeros_like(residual)
    wanted = dense_experts(CpuKernels(dtype), *dequantised).add_to(zeros, x, ids, shares).float()
    difference = kept.add_to(residual.clone(), x, ids, shares).float() - residual.float() - wanted
    assert difference.norm() < 0.02 * wanted.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_has_the_same_bits_alone_and_in_any_batch(dtype: torch.dtype) -> None:
    kept, (residual, x, ids, shares) = packed(dtype, 32), step(dtype)
    together = kept.add_to(residual.clone(), x, ids, shares)
    for first, rows in ((0, 1), (17, 1), (38, 2), (3, 20)):
        span = slice(first, first + rows)
        assert torch.equal(kept.add_to(residual[span].clone(), x[span], ids[span], shares[span]), together[span])


def test_float8_experts_are_left_to_dense_weights() -> None:
    gate_up, down = weights(32)
    assert CpuKernels(torch.float32).quantized_experts(quantize_fp8(gate_up.dense()), down, EXPERTS) is None
    assert CpuKernels(torch.float32).quantized_experts(gate_up, quantize_fp8(down.dense()), EXPERTS) is None
