"""The experts of every device compute what float64 does, whatever tokens choose; no token is lost in any routing."""

from __future__ import annotations

import pytest
import torch

from mini_sglang.kernels.cpu.kernels import CpuKernels
from mini_sglang.kernels.interface import Clamp, ExpertVariant, Kernels
from mini_sglang.kernels.torch_kernels import TorchKernels
from mini_sglang.kernels.triton.experts import (
    EXPERT_TILES,
    ExpertTile,
    combine,
    expert_tile,
    experts,
    experts_reference,
    grouped_matmul,
    tile_rows,
)
from mini_sglang.kernels.triton.kernels import TritonKernels
from mini_sglang.kernels.triton.routing import route, sort_by_expert

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
TOLERANCE = {FP32: 2e-6, FP16: 2e-3, BF16: 1e-2}
EXPERTS, HIDDEN, SIZE = 6, 48, 16
SUBJECTS = {
    "torch": (TorchKernels(), FP32),
    "torch bfloat16": (TorchKernels(), BF16),
    "cpu": (CpuKernels(FP32), FP32),
    "cpu bfloat16": (CpuKernels(BF16), BF16),
    "triton": (TritonKernels(), FP32),
    "triton float16": (TritonKernels(), FP16),
    "triton float16, deterministic": (TritonKernels(deterministic=True), FP16),
}


def token_by_token(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """As the definition has it, in float64."""
    sums = []
    for token, chosen, shares in zip(x.double(), ids.tolist(), weights.double(), strict=True):
        total = torch.zeros_like(token)
        for expert, share in zip(chosen, shares, strict=True):
            gate, up = (gate_up[expert].double() @ token).chunk(2)
            total += share * (down[expert].double() @ (gate * gate.sigmoid() * up))
        sums.append(total)
    return torch.stack(sums)


def make_weights(
    dtype: torch.dtype, device: torch.device, number: int = EXPERTS, hidden: int = HIDDEN, size: int = SIZE
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    return random(number, 2 * size, hidden) / hidden**0.5, random(number, hidden, size) / size**0.5


def make_step(
    rows: int, top_k: int, chosen: int, hidden: int, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """residual, x, and for each row `top_k` of the first `chosen` experts with their weights"""
    torch.manual_seed(rows)
    residual, x = (torch.randn(rows, hidden).to(device, dtype) for _ in range(2))
    ids = torch.rand(rows, chosen).topk(top_k).indices.int()
    return residual, x, ids.to(device), torch.rand(rows, top_k).to(device)


def assert_near(actual: torch.Tensor, wanted: torch.Tensor) -> None:
    """Row by row."""
    error = (actual.double() - wanted.double()).norm(dim=-1) / wanted.double().norm(dim=-1)
    assert error.max() < TOLERANCE[actual.dtype], f"relative error {error.max():.2e} in row {error.argmax()}"


@pytest.mark.parametrize(("kernels", "dtype"), SUBJECTS.values(), ids=SUBJECTS)
@pytest.mark.parametrize("rows", [1, 2, 17, 64])
@pytest.mark.parametrize("chosen", [EXPERTS, 2], ids=["all experts", "two experts"])
def test_equal_float64(kernels: Kernels, dtype: torch.dtype, rows: int, chosen: int, device: torch.device) -> None:
    """With two experts to choose from, every row meets in both, and the others are touched by none."""
    device = device if isinstance(kernels, TritonKernels) else torch.device("cpu")
    gate_up, down = make_weights(dtype, device)
    residual, x, ids, weights = make_step(rows, 2, chosen, HIDDEN, dtype, device)
    wanted = residual.double() + token_by_token(x, ids, weights, gate_up, down)
    out = kernels.experts(gate_up, down).add_to(residual.clone(), x, ids, weights)
    assert out.dtype == dtype
    assert_near(out, wanted)
    assert_near(experts_reference(residual, x, ids, weights, gate_up, down), wanted)


def make_variant(dtype: torch.dtype, device: torch.device, number: int, hidden: int, size: int) -> ExpertVariant:
    """Biases, and a limit that some gates and ups exceed."""
    torch.manual_seed(1)
    gate_up_bias, down_bias = torch.randn(number, 2 * size), torch.randn(number, hidden)
    return ExpertVariant(gate_up_bias.to(device, dtype), down_bias.to(device, dtype), Clamp(1.702, 1.5))


@pytest.mark.parametrize(("kernels", "dtype"), SUBJECTS.values(), ids=SUBJECTS)
@pytest.mark.parametrize("rows", [1, 33])
@pytest.mark.parametrize(("hidden", "size"), [(HIDDEN, SIZE), (80, 48)])
def test_biases_and_a_clamped_gate_equal_float64(
    kernels: Kernels, dtype: torch.dtype, rows: int, hidden: int, size: int, device: torch.device
) -> None:
    """As gpt-oss has them."""
    device = device if isinstance(kernels, TritonKernels) else torch.device("cpu")
    gate_up, down = make_weights(dtype, device, EXPERTS, hidden, size)
    variant = make_variant(dtype, device, EXPERTS, hidden, size)
    gate_up_bias, down_bias, _ = variant
    assert gate_up_bias is not None
    assert down_bias is not None
    residual, x, ids, weights = make_step(rows, 2, EXPERTS, hidden, dtype, device)
    wanted = residual.double()
    for token in range(rows):
        for expert, share in zip(ids[token].tolist(), weights[token].double(), strict=True):
            both = gate_up[expert].double() @ x[token].double() + gate_up_bias[expert].double()
            gate, up = both[:size].clamp(max=1.5), both[size:].clamp(-1.5, 1.5)
            gated = (up + 1) * gate * (1.702 * gate).sigmoid()
            wanted[token] += share * (down[expert].double() @ gated + down_bias[expert].double())
    out = kernels.experts(gate_up, down, variant).add_to(residual.clone(), x, ids, weights)
    assert_near(out, wanted)
    assert_near(experts_reference(residual, x, ids, weights, gate_up, down, variant), wanted)


def test_a_step_may_have_no_rows(device: torch.device) -> None:
    """A step of chunks that sample nothing has no rows after the last layer's attention."""
    for kernels, where in ((TorchKernels(), torch.device("cpu")), (TritonKernels(), device)):
        empty = torch.empty(0, HIDDEN, device=where)
        ids, weights = kernels.route(torch.empty(0, EXPERTS, device=where), 2, normalize=True)
        out = kernels.experts(*make_weights(FP32, where)).add_to(empty, empty, ids, weights)
        assert out.shape == (0, HIDDEN)


@pytest.mark.parametrize("dtype", [FP32, FP16])
@pytest.mark.parametrize(
    ("rows", "top_k", "chosen"),
    [(1, 8, 9), (3, 1, 9), (5, 8, 8), (13, 3, 9), (33, 1, 1), (15, 2, 3)],
    ids=["one token", "fewer than experts", "all of them", "odd", "one expert", "experts without tokens"],
)
@pytest.mark.parametrize(("hidden", "size"), [(64, 32), (80, 48)], ids=["whole tiles", "cut tiles"])
def test_any_choices_equal_float64(
    device: torch.device, dtype: torch.dtype, rows: int, top_k: int, chosen: int, hidden: int, size: int
) -> None:
    gate_up, down = make_weights(dtype, device, 9, hidden, size)
    residual, x, ids, weights = make_step(rows, top_k, chosen, hidden, dtype, device)
    wanted = experts_reference(residual, x, ids, weights, gate_up, down)
    assert experts(residual, x, ids, weights, gate_up, down) is residual
    assert_near(residual, wanted)


@pytest.mark.parametrize("tile", EXPERT_TILES, ids=str)
def test_every_tile_equals_float64(device: torch.device, tile: ExpertTile) -> None:
    gate_up, down = make_weights(FP16, device, 3, 80, 144)
    residual, x, ids, weights = make_step(140, 2, 2, 80, FP16, device)
    wanted = experts_reference(residual, x, ids, weights, gate_up, down)
    sorted_choices = sort_by_expert(ids, 3, tile.rows)
    gated = grouped_matmul(x, gate_up, ids, sorted_choices, tile, gated=True)
    assert_near(combine(residual, grouped_matmul(gated, down, ids, sorted_choices, tile, gated=False), weights), wanted)


def test_unsupported_operands_are_refused(device: torch.device) -> None:
    step = make_step(2, 2, 4, 48, FP32, device)
    with pytest.raises(ValueError, match="multiples of 16, got 48 and 24"):
        experts(*step, *make_weights(FP32, device, 4, 48, 24))
    with pytest.raises(ValueError, match="do not fit each other"):
        experts(*step, *make_weights(FP32, device, 4, 64, 16))
    with pytest.raises(ValueError, match="contiguous"):
        experts(step[0].t().contiguous().t(), *step[1:], *make_weights(FP32, device, 4, 48, 16))


def test_tiles_fit_the_step() -> None:
    """Qwen3-30B-A3B: 128 experts, 8 per token, 2 x 768 columns."""
    for tokens, rows in ((1, 16), (64, 16), (256, 32), (512, 64), (4096, 128), (16384, 128)):
        assert tile_rows(8 * tokens, 128, BF16, deterministic=False) == rows
        tile = expert_tile(rows, 8 * tokens, 128, 1536, BF16)
        assert tile.rows == rows
        assert min(8 * tokens, 128) * -(-1536 // tile.columns) >= 132, "every multiprocessor has work"


def test_deterministic_tiles_differ_in_shape_alone() -> None:
    heights = {tile_rows(8 * tokens, 128, BF16, deterministic=True) for tokens in (1, 2, 64, 500, 16384)}
    assert heights == {64, 128}
    assert len({tile.depth for tile in EXPERT_TILES if tile.rows in heights}) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("tokens", [1, 2, 3, 64, 333, 4096, 16384])
def test_qwen3_30b_a3b_on_a_gpu(dtype: torch.dtype, tokens: int) -> None:
    device = torch.device("cuda")
    gate_up, down = make_weights(dtype, device, 128, 2048, 768)
    residual, x = torch.randn(2, tokens, 2048, device=device, dtype=dtype)
    ids, weights = route(torch.randn(tokens, 128, device=device, dtype=dtype), 8, normalize=True)
    wanted = experts_reference(residual, x, ids, weights, gate_up, down)
    assert_near(experts(residual, x, ids, weights, gate_up, down), wanted)


@pytest.mark.gpu
@pytest.mark.parametrize(("number", "hidden", "size"), [(128, 2048, 768), (8, 4096, 1792), (6, 1040, 272)])
@pytest.mark.usefixtures("dot_by_elements")
def test_a_token_has_the_same_bits_in_every_step_and_tile(number: int, hidden: int, size: int) -> None:
    device = torch.device("cuda")
    gate_up, down = make_weights(BF16, device, number, hidden, size)
    residual, x = torch.randn(2, 4096, hidden, device=device, dtype=BF16)
    ids, weights = route(torch.randn(4096, number, device=device, dtype=BF16), 4, normalize=True)

    def outputs(span: slice) -> torch.Tensor:
        step = residual[span].clone(), x[span], ids[span], weights[span]
        return experts(*step, gate_up, down, deterministic=True)

    wanted = outputs(slice(0, 4096))
    for rows in (1, 2, 3, 8, 33, 64, 200, 1000, 2113):
        for first in (0, 4096 - rows, (4096 - rows) // 3):
            span = slice(first, first + rows)
            assert torch.equal(outputs(span), wanted[span]), (rows, first)
    for tile in (tile for tile in EXPERT_TILES if tile.rows >= 64):
        sorted_choices = sort_by_expert(ids, number, tile.rows)
        gated = grouped_matmul(x, gate_up, ids, sorted_choices, tile, gated=True)
        product = grouped_matmul(gated, down, ids, sorted_choices, tile, gated=False)
        assert torch.equal(combine(residual.clone(), product, weights), wanted), tile


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 24, 700])
def test_a_graph_follows_what_is_chosen(tokens: int) -> None:
    """From all tokens on the same experts to tokens spread over all of them."""
    device = torch.device("cuda")
    gate_up, down = make_weights(BF16, device, 32, 512, 256)
    residual, x = torch.randn(2, tokens, 512, device=device, dtype=BF16)
    logits = torch.zeros(tokens, 32, device=device, dtype=BF16)

    def step() -> torch.Tensor:
        return experts(residual.clone(), x, *route(logits, 4, normalize=True), gate_up, down)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for spread in (0.0, 1.0, 0.1):
        logits.copy_(torch.randn(tokens, 32, device=device) * spread)
        x.normal_()
        graph.replay()
        assert torch.equal(out, step())
