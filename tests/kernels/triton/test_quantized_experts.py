"""Experts with weights in 4 or 8 bits equal the product with the dequantised ones, whatever tokens choose."""

from __future__ import annotations

import pytest
import torch

from mini_sglang.kernels.triton.kernels import TritonKernels
from mini_sglang.kernels.triton.quantized_experts import (
    quantized_expert_tile,
    quantized_experts,
    quantized_experts_reference,
)
from mini_sglang.kernels.triton.routing import route
from mini_sglang.weights.quantized_weight import QuantizedWeight
from tests.kernels.triton.quantized import KINDS, random_weight
from tests.kernels.triton.test_experts import make_step, make_variant

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
EXPERTS, TOP_K = 5, 2
TOLERANCE = {FP32: 3e-5, FP16: 2e-3, BF16: 1e-2}


def make_weights(
    kind: str, hidden: int, size: int, group: int, device: torch.device, number: int = EXPERTS
) -> tuple[QuantizedWeight, QuantizedWeight]:
    """gate_up and down of all experts, with groups of `group` inputs, -1 for whole rows"""
    of_hidden, of_size = (hidden, size) if group == -1 else (group, group)
    gate_up = random_weight(kind, number * 2 * size, hidden, of_hidden)
    return gate_up.to(device), random_weight(kind, number * hidden, size, of_size).to(device)


def assert_near(actual: torch.Tensor, wanted: torch.Tensor) -> None:
    """Row by row."""
    error = (actual.double() - wanted.double()).norm(dim=-1) / wanted.double().norm(dim=-1)
    assert error.max() < TOLERANCE[actual.dtype], f"relative error {error.max():.2e} in row {error.argmax()}"


def check(
    kind: str,
    step: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    gate_up: QuantizedWeight,
    down: QuantizedWeight,
    *,
    deterministic: bool = False,
) -> None:
    residual, x, ids, weights = step
    kept = TritonKernels(deterministic=deterministic).quantized_experts(gate_up, down, EXPERTS)
    assert kept is not None
    wanted = quantized_experts_reference(residual, x, ids, weights, kept._gate_up, kept._down, EXPERTS)
    assert kept.add_to(residual, x, ids, weights) is residual
    assert_near(residual, wanted)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("hidden", "size", "group"),
    [(64, 32, 32), (96, 96, 32), (64, 192, 64), (256, 128, 128), (96, 160, -1)],
    ids=["groups of 32", "cut tiles", "groups of 64", "groups of 128", "whole rows"],
)
@pytest.mark.parametrize(("rows", "chosen"), [(1, EXPERTS), (2, EXPERTS), (19, EXPERTS), (33, 2)])
def test_every_format_equals_float64(
    device: torch.device, kind: str, hidden: int, size: int, group: int, rows: int, chosen: int
) -> None:
    """With two experts to choose from, every row meets in both, and the others are touched by none."""
    step = make_step(rows, TOP_K, chosen, hidden, FP32, device)
    check(kind, step, *make_weights(kind, hidden, size, group, device))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("deterministic", [False, True])
def test_activations_may_be_float16(device: torch.device, kind: str, deterministic: bool) -> None:
    step = make_step(40, TOP_K, EXPERTS, 128, FP16, device)
    check(kind, step, *make_weights(kind, 128, 96, 32, device), deterministic=deterministic)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 33])
def test_biases_and_a_clamped_gate_equal_float64(device: torch.device, kind: str, rows: int) -> None:
    step = make_step(rows, TOP_K, EXPERTS, 96, FP32, device)
    variant = make_variant(FP32, device, EXPERTS, 96, 64)
    gate_up, down = make_weights(kind, 96, 64, 32, device)
    kept = TritonKernels().quantized_experts(gate_up, down, EXPERTS, variant)
    assert kept is not None
    wanted = quantized_experts_reference(*step, kept._gate_up, kept._down, EXPERTS, variant)
    assert_near(kept.add_to(*step), wanted)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("dot_by_elements")
def test_a_tokens_bits_do_not_depend_on_the_others(device: torch.device, kind: str) -> None:
    kept = TritonKernels(deterministic=True).quantized_experts(*make_weights(kind, 64, 32, 32, device), EXPERTS)
    assert kept is not None
    residual, x, ids, weights = make_step(40, TOP_K, EXPERTS, 64, FP16, device)

    def outputs(span: slice) -> torch.Tensor:
        return kept.add_to(residual[span].clone(), x[span], ids[span], weights[span])

    together = outputs(slice(0, 40))
    for first, rows in ((0, 1), (38, 2), (17, 1), (10, 20)):
        span = slice(first, first + rows)
        assert torch.equal(outputs(span), together[span])


def test_gate_and_down_may_have_formats_of_their_own(device: torch.device) -> None:
    gate_up, _ = make_weights("float8", 64, 32, -1, device)
    _, down = make_weights("4 bit", 64, 32, 32, device)
    check("", make_step(7, TOP_K, EXPERTS, 64, FP32, device), gate_up, down)


def test_groups_that_are_no_whole_chunks_are_left_to_dense_weights(device: torch.device) -> None:
    assert TritonKernels().quantized_experts(*make_weights("int8", 72, 72, -1, device), EXPERTS) is None


def test_operands_that_do_not_fit_are_refused(device: torch.device) -> None:
    kept = TritonKernels().quantized_experts(*make_weights("int8", 64, 32, 32, device), EXPERTS)
    assert kept is not None
    residual, x, ids, weights = make_step(2, TOP_K, EXPERTS, 64, FP32, device)
    with pytest.raises(ValueError, match="do not fit each other"):
        quantized_experts(residual, x, ids, weights, kept._gate_up, kept._down, EXPERTS - 1)
    with pytest.raises(ValueError, match="contiguous"):
        kept.add_to(residual, x.t().contiguous().t(), ids, weights)


def test_a_step_may_have_no_rows(device: torch.device) -> None:
    kept = TritonKernels().quantized_experts(*make_weights("int8", 64, 32, 32, device), EXPERTS)
    assert kept is not None
    empty = torch.empty(0, 64, device=device)
    ids = torch.empty(0, TOP_K, dtype=torch.int32, device=device)
    assert kept.add_to(empty, empty, ids, torch.empty(0, TOP_K, device=device)).shape == (0, 64)


def test_deterministic_tiles_have_one_shape() -> None:
    tiles = {quantized_expert_tile(8 * tokens, 128, BF16, deterministic=True) for tokens in (1, 2, 64, 500, 16384)}
    assert len(tiles) == 1


def on_gpu(kind: str, group: int, dtype: torch.dtype = BF16) -> tuple[QuantizedWeight, QuantizedWeight]:
    """Of Qwen3-30B-A3B's shape."""
    device = torch.device("cuda")
    torch.manual_seed(0)

    def random(rows: int, columns: int) -> QuantizedWeight:
        scale = (torch.rand(rows, columns // (columns if group == -1 else group), device=device) + 0.5) * 0.005
        size = columns if group == -1 else group
        if kind == "float8":
            q = (torch.randn(rows, columns, device=device) * 8).to(torch.float8_e4m3fn)
            return QuantizedWeight(q, scale.to(dtype).float(), None, size)
        q = torch.randint(0, 16, (rows, columns), dtype=torch.uint8, device=device)
        scale = scale.to(dtype).float()
        return QuantizedWeight(q, scale, -8 * scale if kind == "symmetric 4 bit" else -7.5 * scale, size)

    return random(128 * 1536, 2048), random(128 * 2048, 768)


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "group"), [("float8", -1), ("float8", 128), ("symmetric 4 bit", 128), ("4 bit", 32)])
@pytest.mark.parametrize("tokens", [1, 2, 3, 64, 333, 4096])
def test_qwen3_30b_a3b_on_a_gpu(kind: str, group: int, tokens: int) -> None:
    device = torch.device("cuda")
    kept = TritonKernels().quantized_experts(*on_gpu(kind, group), 128)
    assert kept is not None
    residual, x = torch.randn(2, tokens, 2048, device=device, dtype=BF16)
    ids, weights = route(torch.randn(tokens, 128, device=device, dtype=BF16), 8, normalize=True)
    wanted = quantized_experts_reference(residual, x, ids, weights, kept._gate_up, kept._down, 128)
    assert_near(kept.add_to(residual, x, ids, weights), wanted)


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "group"), [("float8", -1), ("float8", 128), ("symmetric 4 bit", 128), ("4 bit", 32)])
@pytest.mark.usefixtures("dot_by_elements")
def test_a_token_has_the_same_bits_in_every_step_on_a_gpu(kind: str, group: int) -> None:
    device = torch.device("cuda")
    kept = TritonKernels(deterministic=True).quantized_experts(*on_gpu(kind, group), 128)
    assert kept is not None
    residual, x = torch.randn(2, 4096, 2048, device=device, dtype=BF16)
    ids, weights = route(torch.randn(4096, 128, device=device, dtype=BF16), 8, normalize=True)

    def outputs(span: slice) -> torch.Tensor:
        return kept.add_to(residual[span].clone(), x[span], ids[span], weights[span])

    wanted = outputs(slice(0, 4096))
    for rows in (1, 2, 3, 33, 200, 1000):
        for first in (0, 4096 - rows, (4096 - rows) // 3):
            span = slice(first, first + rows)
            assert torch.equal(outputs(span), wanted[span]), (rows, first)
