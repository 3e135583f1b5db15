"""The batch-invariant product equals its twin, and a row's bits do not depend on the rows around it."""

from __future__ import annotations

import pytest
import torch

from mini_sglang.kernels.matmul import MATMUL_TILES, MatmulTile, matmul, matmul_reference, matmul_tile

SMALL = MatmulTile(64, 16, num_warps=4, num_stages=2)
TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 5e-3}
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


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


def test_the_result_goes_where_it_is_wanted(device: torch.device) -> None:
    x = random(2, 64, dtype=torch.float32, device=device)
    weight = random(8, 64, dtype=torch.float32, device=device, seed=1)
    out = torch.full((3, 8), 7.0, device=device)
    assert matmul(x, weight, out=out[:2]).data_ptr() == out.data_ptr()
    assert_near(out[:2], matmul_reference(x, weight))
    assert out[2].tolist() == [7.0] * 8


def test_rows_may_be_strided_and_none(device: torch.device) -> None:
    wide = random(5, 64, dtype=torch.float32, device=device)
    weight = random(32, 32, dtype=torch.float32, device=device, seed=1)
    assert_near(matmul(wide[:, 16:48], weight), matmul_reference(wide[:, 16:48], weight))
    assert matmul(wide[:0, :32], weight).shape == (0, 32)


def test_what_it_cannot_take_is_refused(device: torch.device) -> None:
    x, weight = torch.zeros(4, 40, device=device), torch.zeros(16, 40, device=device)
    with pytest.raises(ValueError, match="multiple of 16"):
        matmul(x, weight)
    with pytest.raises(ValueError, match="must share"):
        matmul(x[:, :32], weight)
    with pytest.raises(ValueError, match="must be contiguous"):
        matmul(torch.zeros(32, 4, device=device).t(), torch.zeros(16, 32, device=device))


def test_every_step_size_has_a_tile_that_fills_the_gpu_if_one_can() -> None:
    for rows in (1, 64, 65, 128, 129, 256, 257, 1000, 8192):
        for columns in (1024, 4096, 6144, 24576, 151936):
            tile = matmul_tile(rows, columns, torch.bfloat16)
            programs = -(-rows // tile.rows) * -(-columns // tile.columns)
            assert tile in MATMUL_TILES
            assert programs >= 128 or tile.columns <= 32


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("columns", "depth"), [(4096, 4096), (1024, 3072), (6144, 1024), (1040, 4112)])
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
@needs_gpu
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
