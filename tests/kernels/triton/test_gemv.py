"""GEMV equals its twin, alone and with norm, gate, bias and residual in the same launch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mini_sglang.kernels.interface import Norm
from mini_sglang.kernels.triton.gemv import MAX_ROWS, GemvTuning, gemv, gemv_reference


def operands(
    rows: int, n: int, k: int, dtype: torch.dtype, device: torch.device | str
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows * 1000 + n + k)
    x = torch.randn(rows, k, generator=generator)
    weight = torch.randn(n, k, generator=generator) / k**0.5
    return x.to(device, dtype), weight.to(device, dtype)


def check(x: torch.Tensor, weight: torch.Tensor, **extras: Any) -> None:
    expected = gemv_reference(x, weight, **extras)
    tolerance = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}[x.dtype]
    residual = extras.pop("residual", None)
    for tuning in (GemvTuning(block_n=4, block_k=64), GemvTuning(block_n=4, block_k=32, ahead=2)):
        actual = gemv(x, weight, tuning=tuning, residual=None if residual is None else residual.clone(), **extras)
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize(("n", "k"), [(8, 64), (30, 100), (5, 192)])
def test_gemv_with_every_fused_operation(device: torch.device, dtype: torch.dtype, rows: int, n: int, k: int) -> None:
    x, weight = operands(rows, n, k, dtype, device)
    bias, norm = weight[:, 0].contiguous(), Norm(weight[0].contiguous() + 1, 1e-6)
    residual = x[:, :1].expand(rows, n).contiguous()
    check(x, weight)
    check(x, weight, bias=bias)
    check(x, weight, norm=norm)
    check(x, weight, residual=residual)
    check(x, weight, norm=norm, bias=bias, residual=residual)
    if n % 2 == 0:
        check(x, weight, gated=True)
        check(x, weight, norm=norm, bias=bias, gated=True)


def test_the_residual_is_changed_in_place(device: torch.device) -> None:
    x, weight = operands(1, 8, 64, torch.float32, device)
    residual = torch.ones(1, 8, device=device)
    assert gemv(x, weight, residual=residual) is residual
    assert not torch.equal(residual, torch.ones(1, 8, device=device))


def test_the_result_is_written_into_out(device: torch.device) -> None:
    x, weight = operands(2, 8, 64, torch.float32, device)
    out = torch.full((3, 8), 7.0, device=device)
    assert gemv(x, weight, out=out[:2]).data_ptr() == out.data_ptr()
    torch.testing.assert_close(out[:2], gemv_reference(x, weight), rtol=1e-5, atol=1e-5)
    assert out[2].tolist() == [7.0] * 8


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "k"), [(4096, 1024), (6144, 4096), (4096, 12288), (1024, 3072)])
@pytest.mark.parametrize("rows", range(1, MAX_ROWS + 1))
def test_model_shapes_in_bfloat16(n: int, k: int, rows: int) -> None:
    x, weight = operands(rows, n, k, torch.bfloat16, "cuda")
    norm, residual = Norm(weight[0].contiguous() + 1, 1e-6), x[:, :1].expand(rows, n).contiguous()
    for extras in ({"norm": norm, "gated": True}, {"residual": residual}, {}):
        expected = gemv_reference(x, weight, **extras)
        if "residual" in extras:
            extras["residual"] = residual.clone()
        torch.testing.assert_close(gemv(x, weight, **extras), expected, rtol=2e-2, atol=2e-2)


def test_more_rows_are_refused() -> None:
    x, weight = operands(MAX_ROWS + 1, 8, 64, torch.float32, "cpu")
    with pytest.raises(ValueError, match="at most 2 rows, got 3"):
        gemv(x, weight)
