"""Many rows times a quantised weight equal the product with the dequantised one."""

from __future__ import annotations

import pytest
import torch

from mini_sglang.kernels.triton.quantized_gemv import pack
from mini_sglang.kernels.triton.weight_only import (
    WeightOnlyTile,
    dequantize,
    weight_only_matmul,
    weight_only_matmul_reference,
)
from mini_sglang.weights.quantized_weight import QuantizedWeight
from tests.kernels.triton.quantized import KINDS, SHAPES, packed

TILE = WeightOnlyTile(16, 32, num_stages=2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "k", "group"), SHAPES)
@pytest.mark.parametrize("rows", [3, 20])
def test_equals_float64(device: torch.device, kind: str, n: int, k: int, group: int, rows: int) -> None:
    random = torch.Generator().manual_seed(rows)
    weight = packed(kind, n, k, group, device)
    x, bias = torch.randn(rows, k, generator=random).to(device), torch.randn(n, generator=random).to(device)
    residual = torch.randn(rows, n, generator=random).to(device)
    for offset in (None, bias):
        for gated in (False, True):
            wanted = weight_only_matmul_reference(x, weight, offset, gated=gated)
            actual = weight_only_matmul(x, weight, offset, gated=gated, tile=TILE)
            torch.testing.assert_close(actual, wanted, rtol=1e-3, atol=1e-3)
    wanted = weight_only_matmul_reference(x, weight, bias, residual)
    assert weight_only_matmul(x, weight, bias, residual, tile=TILE) is residual
    torch.testing.assert_close(residual, wanted, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_a_rows_bits_do_not_depend_on_the_others(device: torch.device, kind: str) -> None:
    weight = packed(kind, 24, 256, 128, device)
    x = torch.randn(40, 256, generator=torch.Generator().manual_seed(0)).to(device)
    together = weight_only_matmul(x, weight, tile=TILE)
    for row in (0, 17, 39):
        assert torch.equal(weight_only_matmul(x[row : row + 1], weight, tile=TILE)[0], together[row])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "k", "group"), SHAPES)
def test_a_weight_is_written_out_exactly(device: torch.device, kind: str, n: int, k: int, group: int) -> None:
    weight = packed(kind, n, k, group, device)
    torch.testing.assert_close(dequantize(weight, torch.float32), weight.dense(torch.float32))


@pytest.mark.gpu
def test_every_float8_is_exact_in_bfloat16() -> None:
    """All but NaN, each of them an output whose first input alone has a weight."""
    octets = torch.arange(256, dtype=torch.uint8, device="cuda")
    octets[[127, 255]] = 0
    q = torch.zeros(256, 128, dtype=torch.uint8, device="cuda")
    q[:, 0] = octets
    weight = pack(QuantizedWeight(q.view(torch.float8_e4m3fn), torch.ones(256, 1, device="cuda"), None, 128))
    assert weight is not None
    x = torch.zeros(2, 128, dtype=torch.bfloat16, device="cuda")
    x[1, 0] = 1
    wanted = octets.view(torch.float8_e4m3fn).to(torch.bfloat16)
    assert torch.equal(weight_only_matmul(x, weight)[1], wanted)
