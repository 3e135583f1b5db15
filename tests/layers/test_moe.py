"""A mixture whose experts stay as they are stored computes what it does with the dense values, on any ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import pytest
import torch

from mini_sglang.kernels.interface import PLAIN_EXPERTS, Experts, ExpertVariant, Residual
from mini_sglang.kernels.torch_kernels import TorchKernels, dense_experts
from mini_sglang.layers.moe import MixtureOfExperts
from mini_sglang.layers.norm import BlockNorms, RMSNorm
from mini_sglang.layers.placement import Placement
from mini_sglang.model_config import ExpertsConfig, ModelConfig
from mini_sglang.parallel.tensor_parallel import TensorParallel
from mini_sglang.weights.quantize import quantize_fp8, quantize_int4
from mini_sglang.weights.quantized_weight import QuantizedWeight
from tests.layers.stored import on_ranks, tensor

CPU = torch.device("cpu")
EXPERTS, HIDDEN, SIZE = 5, 128, 384
CONFIG = ModelConfig(
    architecture="mixtral",
    vocab_size=8,
    hidden_size=HIDDEN,
    intermediate_size=SIZE,
    num_layers=1,
    num_heads=2,
    num_kv_heads=2,
    head_dim=16,
    context_length=16,
    rms_norm_eps=1e-5,
    rope_theta=1e4,
    experts=ExpertsConfig(num_experts=EXPERTS, experts_per_token=2, intermediate_size=SIZE, normalize_weights=True),
)
X = torch.randn(9, HIDDEN, generator=torch.Generator().manual_seed(0))
FORMATS: dict[str, Callable[[torch.Tensor], QuantizedWeight]] = {
    "float8 by rows": quantize_fp8,
    "float8 by blocks": partial(quantize_fp8, block=(128, 128)),
    "4 bits by 32": partial(quantize_int4, group_size=32),
    "4 bits by 128": partial(quantize_int4, group_size=128),
}

Tensors = Mapping[str, QuantizedWeight | torch.Tensor]


class KeepingKernels(TorchKernels):
    """Multiply by quantised experts as they are, by way of their dense values, and remember them."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[tuple[QuantizedWeight, QuantizedWeight]] = []

    def quantized_experts(
        self, gate_up: QuantizedWeight, down: QuantizedWeight, number: int, variant: ExpertVariant = PLAIN_EXPERTS
    ) -> Experts:
        self.kept.append((gate_up, down))
        ups, downs = (weight.dense().unflatten(0, (number, -1)) for weight in (gate_up, down))
        return dense_experts(self, ups, downs, variant)


def normal(rows: int, columns: int, seed: int) -> torch.Tensor:
    values = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    return values / math.sqrt(columns)


def experts(quantize: Callable[[torch.Tensor], QuantizedWeight]) -> dict[str, QuantizedWeight | torch.Tensor]:
    """Each expert larger than the one before."""
    shapes = {"gate_proj": (SIZE, HIDDEN), "up_proj": (SIZE, HIDDEN), "down_proj": (HIDDEN, SIZE)}
    return {
        f"experts.{expert}.{part}.weight": quantize((expert + 1) * normal(*shape, seed=3 * expert + place))
        for expert in range(EXPERTS)
        for place, (part, shape) in enumerate(shapes.items())
    }


def dense(tensors: Tensors) -> dict[str, torch.Tensor]:
    return {name: w.dense() if isinstance(w, QuantizedWeight) else w for name, w in tensors.items()}


def computed(placement: Placement, tensors: Tensors) -> torch.Tensor:
    norm = RMSNorm(HIDDEN, 1e-5, placement)
    norm.weight_slot().load(tensor("norm", torch.ones(HIDDEN)))
    layer = MixtureOfExperts(CONFIG, placement, 0, BlockNorms(before=norm))
    tensors = {**tensors, "gate.weight": normal(EXPERTS, HIDDEN, seed=99)}
    slots = layer.weight_slots("mlp")
    assert slots.keys() == {f"mlp.{name}" for name in tensors}
    for name, stored in tensors.items():
        slots[f"mlp.{name}"].load(tensor(name, stored))
    return layer(Residual(X.clone())).x


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("name", FORMATS)
def test_experts_stay_as_they_are_stored(name: str, ranks: int, tmp_path: Path) -> None:
    stored = experts(FORMATS[name])
    expected = computed(Placement(CPU, torch.float32, TorchKernels()), dense(stored))

    def work(parallel: TensorParallel) -> torch.Tensor:
        kernels = KeepingKernels()
        result = computed(Placement(CPU, torch.float32, kernels, packed=True, parallel=parallel), stored)
        ((gate_up, down),) = kernels.kept
        assert gate_up.q.shape == (EXPERTS * 2 * SIZE // ranks, HIDDEN)
        assert down.q.shape == (EXPERTS * HIDDEN, SIZE // ranks)
        return result

    for result in on_ranks(ranks, tmp_path / "store", work):
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", FORMATS)
def test_dense_experts_are_quantised_while_they_load(name: str) -> None:
    kernels, given = KeepingKernels(), experts(FORMATS[name])
    quantised = experts(lambda w: FORMATS[name](FORMATS[name](w).dense()))
    placement = Placement(CPU, torch.float32, kernels, packed=True, quantize=FORMATS[name])
    expected = computed(Placement(CPU, torch.float32, TorchKernels()), dense(quantised))
    torch.testing.assert_close(computed(placement, dense(given)), expected)
    assert kernels.kept
    unpacked = Placement(CPU, torch.float32, TorchKernels(), quantize=FORMATS[name])
    torch.testing.assert_close(computed(unpacked, dense(given)), expected)


@pytest.mark.parametrize("odd", ["experts.3.up_proj.weight", "experts.0.down_proj.weight"])
@pytest.mark.parametrize("other", [None, "4 bits by 32"])
def test_experts_that_are_stored_differently_become_dense(odd: str, other: str | None) -> None:
    """As where one matrix of one expert was left as it is."""
    kernels, stored = KeepingKernels(), dict(experts(FORMATS["float8 by rows"]))
    values = dense(stored)[odd]
    stored[odd] = values if other is None else FORMATS[other](values)
    expected = computed(Placement(CPU, torch.float32, TorchKernels()), dense(stored))
    result = computed(Placement(CPU, torch.float32, kernels, packed=True), stored)
    assert not kernels.kept
    torch.testing.assert_close(result, expected)


def test_experts_become_dense_where_no_kernel_takes_them() -> None:
    stored = experts(FORMATS["4 bits by 32"])
    expected = computed(Placement(CPU, torch.float32, TorchKernels()), dense(stored))
    torch.testing.assert_close(computed(Placement(CPU, torch.float32, TorchKernels(), packed=True), stored), expected)
