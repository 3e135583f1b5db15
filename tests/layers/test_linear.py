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
from mini_sglang.parallel import Collectives, TensorParallel
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


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("deterministic", [False, True])
def test_shards_of_the_outputs_are_gated_to_the_parts_of_the_whole(rows: int, deterministic: bool) -> None:
    """Of 40 outputs the first of two ranks has 32, the second 8 and zeros."""
    gate, up = (DummyTensor(name, (40, 32), 0, CPU) for name in ("gate", "up"))
    x = torch.randn(rows, 32, generator=torch.Generator().manual_seed(0))
    scale = NORM.dense() + torch.arange(32)  # far from 1, which would hide mistakes
    normed = F.rms_norm(x, (32,), scale, 1e-3)
    wanted = F.silu(normed @ gate.dense().t()) * (normed @ up.dense().t())
    parts = []
    for rank in range(2):
        parallel = TensorParallel(rank, 2, Collectives(None, DEVICE))  # which a product of shards does not need
        placement = Placement(DEVICE, torch.float32, TritonKernels(deterministic=deterministic), parallel=parallel)
        shard = parallel.shard(40)
        layer = Linear(32, {"gate": shard, "up": shard}, placement, norm_before=True)
        norm = RMSNorm(32, 1e-3, placement, layer.fold_norm)
        norm.weight.copy_(scale)
        for slot, tensor in zip(layer.weight_slots("").values(), (gate, up), strict=True):
            slot.load(tensor)
        assert layer.fold_norm is not None
        layer.fold_norm(norm.weight)
        parts.append(layer.gated(x.to(DEVICE), norm, None).cpu())
    together = torch.cat(parts, dim=1)
    torch.testing.assert_close(together[:, :40], wanted)
    assert not together[:, 40:].any()
