"""Matrices laid out for a CPU compute what a plain matrix product computes."""

from __future__ import annotations

import os

import pytest
import torch

from mini_sglang.kernels.cpu.linear import PrepackedMatrix

ROWS = [1, 2, 3, 16, 40]


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


def test_the_environment_says_how_many_compiled_programs_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "7")
    monkeypatch.delenv("LRU_CACHE_CAPACITY", raising=False)
    PrepackedMatrix(torch.randn(96, 64), None)
    assert (os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"], os.environ["LRU_CACHE_CAPACITY"]) == ("7", "128")
