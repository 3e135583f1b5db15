"""The weight of the norm before a product goes into its columns, in whatever order weights arrive."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

from mini_sglang.kernels.cpu_linear import CpuMatrix
from mini_sglang.kernels.triton_kernels import TritonKernels
from mini_sglang.layers.linear import Linear
from mini_sglang.layers.norm import RMSNorm
from mini_sglang.layers.placement import Placement
from mini_sglang.weights.load import DummyTensor

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CPU = torch.device("cpu")
GATE, UP, NORM = (DummyTensor(name, shape, 0, CPU) for name, shape in (("g", (8, 32)), ("u", (8, 32)), ("n", (32,))))


def loaded(order: tuple[int, ...], dtype: torch.dtype = torch.float32) -> tuple[Linear, RMSNorm]:
    placement = Placement(DEVICE, dtype, TritonKernels())
    layer = Linear(32, {"gate": 8, "up": 8}, placement, norm_before=True)
    norm = RMSNorm(32, 1e-3, placement, layer.fold_norm)
    steps = list(zip([*layer.weight_slots("").values(), norm.weight_slot()], (GATE, UP, NORM), strict=True))
    for step in order:
        slot, tensor = steps[step]
        slot.load(tensor)
    return layer, norm


@pytest.fixture(autouse=True)
def matrices_of_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU too, which has its own."""
    monkeypatch.setattr(CpuMatrix, "available", staticmethod(lambda dtype: False))


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_folded_once_all_have_arrived(order: tuple[int, ...], dtype: torch.dtype) -> None:
    layer, norm = loaded(order, dtype)
    weight = torch.cat((GATE.dense(), UP.dense())).to(dtype).float()
    assert layer.weight is not None
    assert torch.equal(layer.weight.cpu(), (weight * NORM.dense().to(dtype).float()).to(dtype))
    assert norm.parameters.weight is None


@pytest.mark.parametrize("order", list(itertools.permutations(range(3), 2)))
def test_nothing_is_laid_out_before(order: tuple[int, ...]) -> None:
    layer, norm = loaded(order)
    with pytest.raises(AssertionError, match="weights that never arrived"):
        layer(torch.ones(1, 32, device=DEVICE), norm)


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_a_plain_product_is_divided_too(rows: int) -> None:
    layer, norm = loaded((0, 1, 2))
    x = torch.randn(rows, 32, generator=torch.Generator().manual_seed(0))
    wanted = F.rms_norm(x, (32,), NORM.dense(), 1e-3) @ torch.cat((GATE.dense(), UP.dense())).t()
    torch.testing.assert_close(layer(x.to(DEVICE), norm).cpu(), wanted)
    product, rms = layer.undivided(x.to(DEVICE), norm)
    torch.testing.assert_close((product if rms is None else rms.divide(product)).cpu(), wanted)
