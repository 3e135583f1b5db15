"""The batch-invariant matrix product equals its twin, and a row's bits do not depend on the rows around it."""

from __future__ import annotations

import pytest
import torch

from mini_sglang.kernels.triton.matmul import (
    MATMUL_TILES,
    MatmulTile,
    Scales,
    matmul,
    matmul_partials,
    matmul_partials_reference,
    matmul_reference,
    matmul_tile,
)
from mini_sglang.kernels.triton.quantize_rows import quantize_rows

SMALL = MatmulTile(64, 16, num_warps=4, num_stages=2)
TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 5e-3}


def random(*shape: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def assert_near(actual: torch.Tensor, wanted: torch.Tensor) -> None:
    difference = (actual.double() - wanted.double()).norm() / wanted.double().norm()
    assert difference < TOLERANCE[actual.dtype], f"relative error {difference:.2e}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("rows", "columns", "depth"), [(1, 16, 16), (3, 48, 80), (65, 112, 64), (130, 272, 208)])
@pytest.mark.parametrize("tile", [None, SMALL, MatmulTile(128, 64, num_warps=8, num_stages=2)])
def test_equals_float64(
    device: torch.device, dtype: torch.dtype, rows: int, columns: int, depth: int, tile: MatmulTile | None
) -> None:
    x = random(rows, depth, dtype=dtype, device=device)
    weight = random(columns, depth, dtype=dtype, device=device, seed=1)
    assert_near(matmul(x, weight, tile=tile), matmul_reference(x, weight))


def test_adds_a_bias_and_a_residual_in_place(device: torch.device) -> None:
    x = random(70, 96, dtype=torch.float16, device=device)
    weight = random(48, 96, dtype=torch.float16, device=device, seed=1)
    bias = random(48, dtype=torch.float16, device=device, seed=2)
    residual = random(70, 48, dtype=torch.float16, device=device, seed=3)
    wanted = matmul_reference(x, weight, bias, residual)
    assert_near(matmul(x, weight, bias), matmul_reference(x, weight, bias))
    assert matmul(x, weight, bias, residual) is residual
    assert_near(residual, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("rows", "size", "depth"), [(1, 16, 16), (3, 40, 80), (65, 72, 64), (130, 136, 208)])
@pytest.mark.parametrize("tile", [None, MatmulTile(64, 32, num_warps=4, num_stages=2), MATMUL_TILES[4]])
@pytest.mark.parametrize("biased", [False, True])
def test_a_gated_product_is_rounded_once(
    device: torch.device, dtype: torch.dtype, rows: int, size: int, depth: int, tile: MatmulTile | None, biased: bool
) -> None:
    x = random(rows, depth, dtype=dtype, device=device)
    weight = random(2 * size, depth, dtype=dtype, device=device, seed=1)
    bias = random(2 * size, dtype=dtype, device=device, seed=2) if biased else None
    out = torch.full((rows + 1, size), 7.0, dtype=dtype, device=device)
    assert matmul(x, weight, bias, gated=True, out=out[:rows], tile=tile).data_ptr() == out.data_ptr()
    assert_near(out[:rows], matmul_reference(x, weight, bias, gated=True))
    assert out[rows].tolist() == [7.0] * size


@pytest.mark.parametrize(("rows", "columns", "depth", "splits"), [(3, 48, 80, 2), (66, 112, 512, 3), (17, 64, 192, 8)])
@pytest.mark.parametrize("tile", [MATMUL_TILES[2], MatmulTile(16, 64, num_warps=4, num_stages=2)])
def test_each_partial_sum_is_the_product_of_one_slice_of_k(
    device: torch.device, rows: int, columns: int, depth: int, splits: int, tile: MatmulTile
) -> None:
    x = random(rows, depth, dtype=torch.float16, device=device)
    weight = random(columns, depth, dtype=torch.float16, device=device, seed=1)
    actual = matmul_partials(x, weight, splits, tile=tile)
    assert actual.shape == (splits, rows, columns)
    wanted = matmul_partials_reference(x, weight, splits)
    assert (actual.double() - wanted.double()).norm() / wanted.double().norm() < 2e-6
    assert_near(actual.sum(0).half(), matmul_reference(x, weight))
    assert matmul_partials(x[:0], weight, splits, tile=tile).shape == (splits, 0, columns)


def test_the_result_is_written_into_out(device: torch.device) -> None:
    x = random(2, 64, dtype=torch.float32, device=device)
    weight = random(8, 64, dtype=torch.float32, device=device, seed=1)
    out = torch.full((3, 8), 7.0, device=device)
    assert matmul(x, weight, out=out[:2]).data_ptr() == out.data_ptr()
    assert_near(out[:2], matmul_reference(x, weight))
    assert out[2].tolist() == [7.0] * 8


def test_rows_may_be_strided_or_absent(device: torch.device) -> None:
    wide = random(5, 64, dtype=torch.float32, device=device)
    weight = random(32, 32, dtype=torch.float32, device=device, seed=1)
    assert_near(matmul(wide[:, 16:48], weight), matmul_reference(wide[:, 16:48], weight))
    assert matmul(wide[:0, :32], weight).shape == (0, 32)


def test_unsupported_operands_are_refused(device: torch.device) -> None:
    x, weight = torch.zeros(4, 40, device=device), torch.zeros(16, 40, device=device)
    with pytest.raises(ValueError, match="multiple of 16"):
        matmul(x, weight)
    with pytest.raises(ValueError, match="must share"):
        matmul(x[:, :32], weight)
    with pytest.raises(ValueError, match="must be contiguous"):
        matmul(torch.zeros(32, 4, device=device).t(), torch.zeros(16, 32, device=device))
    with pytest.raises(ValueError, match="no residual"):
        matmul(x[:, :32], torch.zeros(16, 32, device=device), residual=torch.zeros(4, 8, device=device), gated=True)
    with pytest.raises(ValueError, match="two halves"):
        matmul(x[:, :32], torch.zeros(15, 32, device=device), gated=True)


def test_every_step_size_has_a_tile_that_fills_the_gpu_if_one_can() -> None:
    for rows in (1, 64, 65, 128, 129, 256, 257, 1000, 8192):
        for columns in (1024, 4096, 6144, 24576, 151936):
            tile = matmul_tile(rows, columns, torch.bfloat16)
            programs = -(-rows // tile.rows) * -(-columns // tile.columns)
            assert tile in MATMUL_TILES
            assert programs >= 128 or tile.columns <= 32


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_gated_row_adds_in_one_order_in_every_batch_and_tile(device: torch.device, dtype: torch.dtype) -> None:
    """K holds a large block, a small one, and the large one's negative: the small one is rounded between the two.

    Within a block small integers add exactly, since the interpreter's products of a block have no order of their own.
    """
    size, block = 72, 64
    scale = torch.tensor([512, 1 / 8, 512]).repeat_interleave(block)
    x = (random(200, 3 * block, dtype=dtype, device=device) * 2).round() * scale.to(device, dtype)
    weight = (random(2 * size, 3 * block, dtype=dtype, device=device, seed=1) * 2).round()
    x[:, 2 * block :], weight[:, :block] = x[:, :block], weight[:, :block] * 512
    weight[:, 2 * block :] = -weight[:, :block]
    bias = random(2 * size, dtype=dtype, device=device, seed=2)
    wanted = matmul(x, weight, bias, gated=True)
    assert wanted.isfinite().all()
    assert not torch.isclose(wanted, matmul_reference(x, weight, bias, gated=True), rtol=1e-2).all()
    for tile in MATMUL_TILES:
        if dtype.itemsize > 2 and tile.columns > 64:
            continue
        for first, rows in ((0, 1), (0, 64), (63, 65), (71, 129), (0, 200)):
            span = slice(first, first + rows)
            assert torch.equal(matmul(x[span], weight, bias, gated=True, tile=tile), wanted[span]), (tile, first, rows)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("columns", "depth"), [(4096, 4096), (1024, 3072), (6144, 1024), (1040, 4112)])
@pytest.mark.usefixtures("dot_by_elements")
def test_a_row_has_the_same_bits_in_every_batch_and_tile(dtype: torch.dtype, columns: int, depth: int) -> None:
    device = torch.device("cuda")
    x = random(8192, depth, dtype=dtype, device=device)
    weight = random(columns, depth, dtype=dtype, device=device, seed=1) / depth**0.5
    bias = random(columns, dtype=dtype, device=device, seed=2)
    residual = random(8192, columns, dtype=dtype, device=device, seed=3)
    wanted = matmul(x, weight, bias, residual.clone())
    assert_near(wanted, matmul_reference(x, weight, bias, residual))
    for rows in (1, 2, 7, 8, 33, 64, 65, 100, 128, 129, 200, 256, 257, 500, 1000, 2113, 4096, 8192):
        for first in {0, 8192 - rows, (8192 - rows) // 3}:
            span = slice(first, first + rows)
            assert torch.equal(matmul(x[span], weight, bias, residual[span].clone()), wanted[span]), (rows, first)
    for tile in MATMUL_TILES:
        assert torch.equal(matmul(x[:300], weight, bias, residual[:300].clone(), tile=tile), wanted[:300]), tile


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("size", "depth"), [(3072, 1024), (12288, 4096), (520, 4112)])
def test_a_gated_row_has_the_same_bits_on_a_gpu(dtype: torch.dtype, size: int, depth: int) -> None:
    device = torch.device("cuda")
    x = random(2113, depth, dtype=dtype, device=device)
    weight = random(2 * size, depth, dtype=dtype, device=device, seed=1) / depth**0.5
    bias = random(2 * size, dtype=dtype, device=device, seed=2)
    wanted = matmul(x, weight, bias, gated=True)
    assert_near(wanted, matmul_reference(x, weight, bias, gated=True))
    for rows in (1, 2, 7, 33, 64, 65, 100, 128, 129, 200, 256, 257, 500, 1000):
        for first in {0, 2113 - rows, (2113 - rows) // 3}:
            span = slice(first, first + rows)
            assert torch.equal(matmul(x[span], weight, bias, gated=True), wanted[span]), (rows, first)
    for tile in MATMUL_TILES:
        assert torch.equal(matmul(x[:300], weight, bias, gated=True, tile=tile), wanted[:300]), tile


@pytest.mark.gpu
def test_a_product_follows_its_input_in_a_cuda_graph() -> None:
    device = torch.device("cuda")
    x = random(24, 1024, dtype=torch.bfloat16, device=device)
    weight = random(2048, 1024, dtype=torch.bfloat16, device=device, seed=1)
    matmul(x, weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = matmul(x, weight)
    x.copy_(random(24, 1024, dtype=torch.bfloat16, device=device, seed=4))
    graph.replay()
    assert torch.equal(out, matmul(x, weight))


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(("rows", "columns", "depth"), [(3, 48, 256), (70, 130, 128), (130, 64, 384)])
def test_float8_operands_equal_float64(
    device: torch.device, grouped: bool, splits: int, rows: int, columns: int, depth: int
) -> None:
    x, of_x = quantize_rows(random(rows, depth, dtype=torch.float32, device=device), grouped=grouped)
    weight, of_weight = quantize_rows(
        random(columns, depth, dtype=torch.float32, device=device, seed=1), grouped=grouped
    )
    scales = Scales(of_x, of_weight)
    bias = random(columns, dtype=torch.bfloat16, device=device, seed=2)
    residual = random(rows, columns, dtype=torch.bfloat16, device=device, seed=3)
    for gated in (False, True):
        wanted = matmul_reference(x, weight, bias, scales=scales, gated=gated)
        assert_near(matmul(x, weight, bias, scales=scales, gated=gated, tile=SMALL, splits=splits), wanted)
    wanted = matmul_reference(x, weight, bias, residual, scales=scales)
    assert_near(matmul(x, weight, bias, residual, scales=scales, tile=SMALL, splits=splits), wanted)
