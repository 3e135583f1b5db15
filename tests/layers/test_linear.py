"""A linear layer whose parts stay as they are stored computes what it does with the dense values, on any ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from mini_sglang.kernels.interface import Matrix, Residual
from mini_sglang.kernels.torch_kernels import TorchKernels, TorchMatrix
from mini_sglang.layers.linear import Linear
from mini_sglang.layers.placement import Placement
from mini_sglang.parallel.tensor_parallel import TensorParallel
from mini_sglang.weights.quantize import quantize_fp8, quantize_int4
from mini_sglang.weights.quantized_weight import QuantizedWeight
from tests.layers.stored import on_ranks, tensor

CPU = torch.device("cpu")
INPUTS = 384
FORMATS: dict[str, Callable[[torch.Tensor], QuantizedWeight]] = {
    "float8 by rows": quantize_fp8,
    "float8 by blocks": lambda w: quantize_fp8(w, (128, 128)),
    "4 bits by 32": lambda w: quantize_int4(w, 32),
    "4 bits by 128": lambda w: quantize_int4(w, 128),
}


class KeepingKernels(TorchKernels):
    """Multiply by quantised matrices as they are, by way of their dense values, and remember them."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[QuantizedWeight] = []

    def quantized_matrix(self, weight: QuantizedWeight, bias: torch.Tensor | None) -> Matrix:
        self.kept.append(weight)
        return TorchMatrix(self, weight.dense(), bias)


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def load(layer: Linear, tensors: Mapping[str, QuantizedWeight | torch.Tensor]) -> None:
    for name, slot in layer.weight_slots("m").items():
        part = name.removeprefix("m.").removesuffix(".weight")
        slot.load(tensor(name, tensors[part]))


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("name", FORMATS)
def test_a_row_parallel_layer_sums_to_the_product_with_the_dense_matrix(name: str, ranks: int, tmp_path: Path) -> None:
    stored = FORMATS[name](normal(40, INPUTS, seed=1))
    bias, x, residual = normal(40, seed=2), normal(7, INPUTS, seed=3), normal(7, 40, seed=4)
    expected = residual + F.linear(x, stored.dense(), bias)

    def work(parallel: TensorParallel) -> torch.Tensor:
        kernels, inputs = KeepingKernels(), parallel.shard(INPUTS)
        placement = Placement(CPU, torch.float32, kernels, packed=True, parallel=parallel)
        layer = Linear(inputs, {"out": 40}, placement, bias=True, summed=True)
        load(layer, {"out": stored, "out.bias": bias})
        assert [weight.q.shape for weight in kernels.kept] == [(40, INPUTS // ranks)]
        return layer.add_to(residual.clone(), x[:, inputs.start : inputs.stop].contiguous()).x

    for result in on_ranks(ranks, tmp_path / "store", work):
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("name", FORMATS)
def test_parts_with_scales_of_their_own_are_stacked_in_order(name: str, ranks: int, tmp_path: Path) -> None:
    """Outputs of 90 and 33 on 3 ranks: nothing divides."""
    parts = {
        "q": FORMATS[name](normal(90, INPUTS, seed=1)),
        "k": FORMATS[name](9 * normal(33, INPUTS, seed=2)),
    }
    x = normal(7, INPUTS, seed=3)

    def work(parallel: TensorParallel) -> torch.Tensor:
        kernels, shards = KeepingKernels(), {part: parallel.shard(w.q.shape[0]) for part, w in parts.items()}
        layer = Linear(INPUTS, shards, Placement(CPU, torch.float32, kernels, packed=True, parallel=parallel))
        load(layer, parts)
        assert len(kernels.kept) == 1
        for part, output in zip(
            parts, layer(Residual(x)).split([shard.size for shard in shards.values()], 1), strict=True
        ):
            rows = slice(shards[part].start, shards[part].stop)
            expected = torch.zeros(7, shards[part].size)
            expected[:, : rows.stop - rows.start] = F.linear(x, parts[part].dense()[rows])
            torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-4)
        return x

    on_ranks(ranks, tmp_path / "store", work)


@pytest.mark.parametrize(
    ("q", "k"),
    [("float8 by rows", "float8 by blocks"), ("float8 by rows", "4 bits by 32"), ("4 bits by 32", None)],
)
def test_parts_that_are_stored_differently_become_dense(q: str, k: str | None) -> None:
    """As where one of the matrices that a layer stacks was left as it is."""
    kernels = KeepingKernels()
    parts: dict[str, QuantizedWeight | torch.Tensor] = {
        "q": FORMATS[q](normal(24, INPUTS, seed=1)),
        "k": normal(16, INPUTS, seed=2) if k is None else FORMATS[k](normal(16, INPUTS, seed=2)),
    }
    layer = Linear(INPUTS, {"q": 24, "k": 16}, Placement(CPU, torch.float32, kernels, packed=True))
    load(layer, parts)
    x = normal(7, INPUTS, seed=3)
    dense = [part if isinstance(part, torch.Tensor) else part.dense() for part in parts.values()]
    assert not kernels.kept
    torch.testing.assert_close(layer(Residual(x)), F.linear(x, torch.cat(dense)), rtol=1e-5, atol=1e-4)
