"""Matrices laid out for a CPU compute what a plain matrix product computes."""

from __future__ import annotations

import os

import pytest
import torch

from mini_sglang.kernels.cpu.linear import Int4Matrix, PrepackedMatrix
from mini_sglang.weights.quantized_weight import QuantizedWeight

ROWS = [1, 2, 3, 16, 40]


def random_blocks(out_features: int, in_features: int) -> QuantizedWeight:
    groups = in_features // 32
    return QuantizedWeight(
        q=torch.randint(0, 16, (out_features, in_features), dtype=torch.uint8),
        scale=torch.rand(out_features, groups) * 0.02,
        minimum=-torch.rand(out_features, groups) * 0.2,
        group_size=32,
    )


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("bias", [False, True])
def test_prepacked_equals_the_plain_product(rows: int, bias: bool) -> None:
    torch.manual_seed(0)
    weight, x, addend = torch.randn(96, 64), torch.randn(rows, 64), torch.randn(rows, 96)
    offset = torch.randn(96) if bias else None
    matrix = PrepackedMatrix(weight, offset)
    expected = torch.nn.functional.linear(x, weight, offset)
    torch.testing.assert_close(matrix.multiply(x), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(matrix.multiply_add(x, addend), addend + expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.parametrize("bias", [False, True])
def test_4_bit_blocks_equal_their_dense_matrix(rows: int, bias: bool) -> None:
    torch.manual_seed(0)
    blocks = random_blocks(64, 128)
    x = torch.randn(rows, 128).bfloat16()
    offset = torch.randn(64).bfloat16() if bias else None
    expected = torch.nn.functional.linear(x.float(), blocks.dense(), None if offset is None else offset.float())
    error = (Int4Matrix(blocks, offset).multiply(x).float() - expected).abs().max() / expected.abs().max()
    assert error < 0.01  # bfloat16 scales and results


def test_shapes_the_4_bit_kernel_cannot_take_are_known_beforehand() -> None:
    assert Int4Matrix.supports(random_blocks(16, 64))
    assert not Int4Matrix.supports(random_blocks(20, 64))


def test_the_environment_says_how_many_compiled_programs_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "7")
    monkeypatch.delenv("LRU_CACHE_CAPACITY", raising=False)
    PrepackedMatrix(torch.randn(96, 64), None)
    assert (os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"], os.environ["LRU_CACHE_CAPACITY"]) == ("7", "128")
