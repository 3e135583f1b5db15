"""Activations in float8: the nearest ones to x / scale, with a scale for a row or for 128 inputs."""

from __future__ import annotations

import pytest
import torch

from mini_sglang.kernels.interface import Norm
from mini_sglang.kernels.triton.quantize_rows import quantize_rows, quantize_rows_reference


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize(("rows", "k"), [(3, 256), (40, 128), (1, 384)])
@pytest.mark.parametrize("normed", [False, True])
def test_equals_its_twin(device: torch.device, grouped: bool, rows: int, k: int, normed: bool) -> None:
    random = torch.Generator().manual_seed(k)
    x = torch.randn(rows, k, generator=random).to(device)
    x[0, :128] = 0
    norm = Norm(torch.rand(k, generator=random).to(device) + 0.5, 1e-6) if normed else None
    q, scale = quantize_rows(x, norm, grouped=grouped)
    wanted, wanted_scale = quantize_rows_reference(x, norm, grouped=grouped)
    assert scale.shape == (k // 128 if grouped else 1, rows)
    torch.testing.assert_close(scale, wanted_scale)
    differs = q.float() != wanted.float()
    if device.type == "cpu":  # Triton's interpreter rounds up to a power of two wrongly, and to nothing else
        differs &= torch.frexp(wanted.float())[0].abs() != 0.5
    assert differs.float().mean() < 0.01  # where two float8 are about as near, the last bit of the scale decides


def test_a_group_of_zeros_stays_zero(device: torch.device) -> None:
    q, scale = quantize_rows(torch.zeros(2, 256, device=device), grouped=True)
    assert not q.float().any()
    assert bool((scale == 1).all())


def test_groups_must_divide_a_row(device: torch.device) -> None:
    with pytest.raises(ValueError, match="a multiple of 128"):
        quantize_rows(torch.zeros(2, 192, device=device), grouped=True)
