"""Tokens go to the experts with the largest weights, and choices are sorted by expert, whatever was chosen."""

from __future__ import annotations

import pytest
import torch

from mini_sglang.kernels.triton.routing import (
    max_tiles,
    route,
    route_reference,
    sort_by_expert,
    sort_by_expert_reference,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(1, 8, 2), (5, 128, 8), (3, 6, 6), (2, 60, 3), (4, 3, 1)])
def test_routing_equals_its_twin(
    device: torch.device, dtype: torch.dtype, normalize: bool, tokens: int, experts: int, top_k: int
) -> None:
    torch.manual_seed(0)
    logits = (3 * torch.randn(tokens, experts)).to(device, dtype)
    ids, weights = route(logits, top_k, normalize=normalize)
    wanted_ids, wanted = route_reference(logits, top_k, normalize=normalize)
    assert torch.equal(ids, wanted_ids)
    torch.testing.assert_close(weights, wanted)
    if normalize:
        torch.testing.assert_close(weights.sum(-1), torch.ones(tokens, device=device))


def test_of_equal_experts_the_earlier_ones_are_taken(device: torch.device) -> None:
    logits = torch.tensor([[0.0, 1.0, 1.0, 0.0, 1.0], [-200.0, 0.0, -200.0, -200.0, -200.0]], device=device)
    ids, weights = route(logits, 4, normalize=False)
    assert ids.tolist() == [[1, 2, 4, 0], [1, 0, 2, 3]]
    assert weights[1].tolist() == [1, 0, 0, 0]


@pytest.mark.gpu  # the interpreter finds no largest among NaN
def test_nan_is_routed_to_experts_that_exist(device: torch.device) -> None:
    ids, _ = route(torch.full((2, 6), float("nan"), device=device), 2, normalize=True)
    assert ids.max() < 6


def test_unsupported_logits_are_refused(device: torch.device) -> None:
    with pytest.raises(ValueError, match="at most the number of experts, 4, got 5"):
        route(torch.zeros(1, 4, device=device), 5, normalize=True)
    with pytest.raises(ValueError, match="contiguous"):
        route(torch.zeros(4, 4, device=device).t(), 2, normalize=True)


@pytest.mark.parametrize("tile_rows", [16, 64])
@pytest.mark.parametrize(
    ("tokens", "experts", "top_k", "chosen"),
    [(1, 8, 1, 8), (7, 6, 3, 6), (64, 128, 8, 128), (33, 5, 1, 1), (700, 4, 4, 4), (40, 128, 2, 3)],
)
def test_sorting_equals_its_twin(
    device: torch.device, tokens: int, experts: int, top_k: int, chosen: int, tile_rows: int
) -> None:
    """More choices than one program reads at a time, experts without any, all choices on one expert."""
    torch.manual_seed(0)
    ids = torch.rand(tokens, chosen).topk(min(top_k, chosen)).indices.int().to(device)
    wanted = sort_by_expert_reference(ids, experts, tile_rows)
    actual = sort_by_expert(ids, experts, tile_rows)
    assert torch.equal(actual.choices, wanted.choices)
    assert torch.equal(actual.tiles, wanted.tiles)


def test_max_tiles_is_enough_for_any_choices() -> None:
    for counts in ([1, 1, 1], [17, 16, 1], [15, 0, 33], [0, 0, 5], [100, 1, 0]):
        tiles = sum(-(-count // 16) for count in counts)
        assert tiles <= max_tiles(sum(counts), 3, 16)


@pytest.mark.gpu
def test_a_full_step_on_a_gpu() -> None:
    torch.manual_seed(0)
    logits = torch.randn(16384, 128, device="cuda", dtype=torch.bfloat16)
    ids, weights = route(logits, 8, normalize=True)
    wanted_ids, wanted = route_reference(logits, 8, normalize=True)
    assert torch.equal(ids, wanted_ids)
    torch.testing.assert_close(weights, wanted)
    actual, expected = sort_by_expert(ids, 128, 128), sort_by_expert_reference(ids, 128, 128)
    assert torch.equal(actual.choices, expected.choices)
    assert torch.equal(actual.tiles, expected.tiles)
