"""Products with packed weights: near the dequantised product, and of the same bits however they are computed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest
import torch

from mini_sglang.kernels.cpu.compiled_packed import best_instruction
from mini_sglang.kernels.cpu.kernels import CpuKernels
from mini_sglang.kernels.cpu.packed import PackedMatrix, form_of
from mini_sglang.kernels.interface import Matrix, Norm
from mini_sglang.kernels.torch_kernels import TorchKernels
from mini_sglang.weights.quantized_weight import QuantizedWeight

DTYPES = [torch.float32, torch.bfloat16]
SHAPES = [
    (32, 64, 32),
    (50, 100, 32),
    (7, 33, 64),
    (96, 256, 128),
    (40, 90, 90),
    (24, 80, 16),
    (33, 70, 48),
    (3000, 576, 32),
]
ROWS = (1, 2, 3, 4, 5, 8, 13, 64, 70)


def random_weight(outputs: int, inputs: int, group: int, bits: int = 4, *, minimum: bool = True) -> QuantizedWeight:
    """Values of the whole range, the extremes included; the first group of the first row is all zero."""
    groups = -(-inputs // group)
    low, high, dtype = (0, 16, torch.uint8) if bits == 4 else (-128, 128, torch.int8)
    q = torch.randint(low, high, (outputs, inputs)).to(dtype)
    q[-1], q[-2] = high - 1, low
    weight = QuantizedWeight(
        q, torch.rand(outputs, groups) / high, -torch.rand(outputs, groups) * 0.5 if minimum else None, group
    )
    for numbers in (weight.scale, weight.minimum):
        if numbers is not None:
            numbers[0, 0] = 0
    return weight


def packed(weight: QuantizedWeight, bias: torch.Tensor | None = None, dtype: torch.dtype = torch.float32) -> Matrix:
    matrix = CpuKernels(dtype).quantized_matrix(weight, bias)
    assert isinstance(matrix, PackedMatrix)
    return matrix


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("bits", "minimum"), [(4, True), (8, False), (8, True), (4, False)])
def test_a_row_has_the_same_bits_alone_and_in_any_batch(
    dtype: torch.dtype, shape: tuple[int, int, int], bits: int, minimum: bool
) -> None:
    matrix = packed(random_weight(*shape, bits, minimum=minimum), torch.randn(shape[0]).to(dtype), dtype)
    norm = Norm(torch.randn(shape[1]).to(dtype), 1e-5)
    x, residual = torch.randn(max(ROWS), shape[1]).to(dtype), torch.randn(max(ROWS), shape[0]).to(dtype)
    torch.set_num_threads(1)
    alone = [
        (matrix.matmul(row), matrix.matmul(row, norm), matrix.add_to(addend, row).x)
        for row, addend in zip(x.split(1), residual.split(1), strict=True)
    ]
    plain, normed, added = (torch.cat(results) for results in zip(*alone, strict=True))
    for rows, threads in product(ROWS, (1, 2)):
        torch.set_num_threads(threads)
        assert torch.equal(matrix.matmul(x[:rows]), plain[:rows])
        assert torch.equal(matrix.matmul(x[-rows:], norm), normed[-rows:])
        assert torch.equal(matrix.add_to(residual[:rows], x[:rows]).x, added[:rows])


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
@pytest.mark.parametrize("outputs", [64, 40])  # halves that are whole tiles, and others
@pytest.mark.parametrize("bias", [False, True])
def test_gated_rows_have_the_same_bits_alone_and_in_any_batch(dtype: torch.dtype, outputs: int, bias: bool) -> None:
    kernels, weight = CpuKernels(dtype), random_weight(outputs, 96, 32)
    offset = torch.randn(outputs).to(dtype) if bias else None
    matrix = packed(weight, offset, dtype)
    norm, x = Norm(torch.ones(96).to(dtype), 1e-5), torch.randn(70, 96).to(dtype)
    alone = torch.cat([matrix.gated(row, norm) for row in x.split(1)])
    for rows in ROWS:
        assert torch.equal(matrix.gated(x[:rows], norm), alone[:rows])
    expected = kernels.silu_mul(matrix.matmul(x, norm))
    torch.testing.assert_close(alone, expected, atol=2e-2 if dtype == torch.bfloat16 else 1e-5, rtol=2e-2)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("bits", "minimum"), [(4, True), (8, False), (8, True)])
@pytest.mark.parametrize("rows", [1, 6])
def test_the_error_is_that_of_activations_in_8_bits(
    shape: tuple[int, int, int], bits: int, minimum: bool, rows: int
) -> None:
    weight = random_weight(*shape, bits, minimum=minimum)
    x = torch.randn(rows, shape[1])
    dense = weight.dense()
    # an input is off by at most half a step, 1/127 of the largest of its block and so of its row
    bound = (x.abs().amax(1, keepdim=True) / 127 / 2) * dense.abs().sum(1) + 1e-4
    assert ((packed(weight).matmul(x) - x @ dense.T).abs() <= bound).all()


def test_inputs_that_8_bits_hold_give_the_exact_product() -> None:
    weight = random_weight(48, 96, 32, 8, minimum=False)
    weight.scale.fill_(0.25)
    x = torch.randint(-127, 128, (5, 96)).float()
    x[:, ::32] = 127
    assert torch.equal(packed(weight).matmul(x), x @ weight.dense().T)


def test_rows_of_zeros_give_the_bias() -> None:
    bias = torch.randn(50)
    assert torch.equal(packed(random_weight(50, 100, 32), bias).matmul(torch.zeros(3, 100)), bias.expand(3, -1))


def test_what_is_no_number_stays_none() -> None:
    x = torch.ones(3, 64)
    x[1, 5] = float("nan")
    y = packed(random_weight(32, 64, 32)).matmul(x)
    assert y[1].isnan().any()
    assert y[[0, 2]].isfinite().all()


def test_the_result_can_be_written_in_place() -> None:
    matrix, x, out = packed(random_weight(50, 64, 32)), torch.randn(5, 64), torch.empty(5, 50)
    assert matrix.matmul(x, out=out) is out
    assert torch.equal(out, matrix.matmul(x))


def test_a_norm_is_the_kernels_norm() -> None:
    matrix, x, norm = packed(random_weight(32, 100, 32)), torch.randn(5, 100), Norm(torch.randn(100), 1e-5)
    normed = TorchKernels().rms_norm(x, norm.weight, norm.eps)
    torch.testing.assert_close(matrix.matmul(x, norm), matrix.matmul(normed), atol=1e-2, rtol=1e-2)


@pytest.mark.skipif(best_instruction() == "portable", reason="there is no other instruction to compare with")
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("halves", [False, True])  # scales that 16 bits hold are kept in 16, but by plain code
def test_every_instruction_gives_the_same_bits(bits: int, halves: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = random_weight(50, 100, 32, bits), torch.randn(6, 100)
    if halves:
        assert weight.minimum is not None
        weight = replace(weight, scale=weight.scale.half().float(), minimum=weight.minimum.half().float())
    assert form_of(weight).scale_bits == (16 if halves else 32)
    fastest = packed(weight).matmul(x)

    monkeypatch.setattr("mini_sglang.kernels.cpu.packed.best_instruction", lambda: "portable")
    assert torch.equal(packed(weight).matmul(x), fastest)
    assert torch.equal(packed(weight).matmul(x[:1]), fastest[:1])


def test_weights_in_float8_have_no_kernel() -> None:
    weight = QuantizedWeight(torch.ones(16, 32).to(torch.float8_e4m3fn), torch.ones(16, 1), None, 32)
    assert CpuKernels(torch.float32).quantized_matrix(weight, None) is None
