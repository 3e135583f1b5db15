"""Which experts a token goes to, and which tokens an expert gets: all on the device, so CUDA graphs can capture it.

`route` chooses the experts of each token; `sort_by_expert` groups the choices of a step by expert and cuts each group
into tiles for the grouped matrix product (`experts.py`). Each stands beside its PyTorch twin. Knows no weights.
"""

# Pointers and scalars of a Triton kernel have no Python types:
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from mini_sglang.kernels.triton.pdl import pdl_launch, pdl_wait

_CHUNK = 2048  # choices that a program reads at a time
_TILES = 32  # tiles of an expert that a program writes at a time


class SortedChoices(NamedTuple):
    """The choices of a step (token * k + place), sorted by expert, and the tiles that cover them."""

    choices: torch.Tensor  # [T * k] int32; those of one expert are consecutive, in the order of tokens
    tiles: torch.Tensor  # [3, max tiles] int32: expert, first entry of `choices`, and end; idle tiles end at 0


def route(logits: torch.Tensor, top_k: int, *, normalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the `top_k` experts of each token by a softmax over all of them, the largest first, equals by index.

    logits [T, experts] contiguous -> ids [T, k] int32 and weights [T, k] float32; with `normalize` a row's weights add
    up to 1. Raises ValueError for a `top_k` above the number of experts, and for strided logits.
    """
    tokens, experts = logits.shape
    if top_k > experts:
        raise ValueError(f"top_k must be at most the number of experts, {experts}, got {top_k}")
    if not logits.is_contiguous():
        raise ValueError("logits must be contiguous")
    ids = torch.empty(tokens, top_k, dtype=torch.int32, device=logits.device)
    weights = torch.empty(tokens, top_k, dtype=torch.float32, device=logits.device)
    _route_kernel[(tokens,)](
        logits,
        ids,
        weights,
        EXPERTS=experts,
        BLOCK=triton.next_power_of_2(experts),
        TOP_K=top_k,
        PLACES=triton.next_power_of_2(top_k),
        NORMALIZE=normalize,
        num_warps=1,
        **pdl_launch(logits.device),
    )
    return ids, weights


def route_reference(logits: torch.Tensor, top_k: int, *, normalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The twin of `route`."""
    shares, ids = logits.softmax(-1, dtype=torch.float32).sort(dim=-1, descending=True, stable=True)
    weights = shares[:, :top_k]
    return ids[:, :top_k].int(), weights / weights.sum(-1, keepdim=True) if normalize else weights


def sort_by_expert(ids: torch.Tensor, num_experts: int, tile_rows: int) -> SortedChoices:
    """Group the choices `ids` [T, k] int32 contiguous by expert, and cut each group into tiles of `tile_rows`.

    One launch whose grid does not depend on the choices. The program of an expert counts all choices and then collects
    its own in order, without atomics, so the result is always in the same order.
    """
    num_choices = ids.numel()
    choices = torch.empty(num_choices, dtype=torch.int32, device=ids.device)
    tiles = torch.empty(3, max_tiles(num_choices, num_experts, tile_rows), dtype=torch.int32, device=ids.device)
    _sort_kernel[(num_experts,)](
        ids,
        choices,
        tiles,
        num_choices,
        tiles.shape[1],
        BINS=max(triton.next_power_of_2(num_experts), 32),
        CHUNK=min(triton.next_power_of_2(num_choices), _CHUNK),
        TILE_ROWS=tile_rows,
        TILES=_TILES,
        num_warps=4 if num_choices <= _CHUNK // 2 else 8,
        **pdl_launch(ids.device),
    )
    return SortedChoices(choices, tiles)


def sort_by_expert_reference(ids: torch.Tensor, num_experts: int, tile_rows: int) -> SortedChoices:
    """The twin of `sort_by_expert`."""
    counts = ids.flatten().bincount(minlength=num_experts).tolist()
    tiles = []
    begin = 0
    for expert, count in enumerate(counts):
        tiles += [(expert, first, begin + count) for first in range(begin, begin + count, tile_rows)]
        begin += count
    tiles += [(0, 0, 0)] * (max_tiles(ids.numel(), num_experts, tile_rows) - len(tiles))
    return SortedChoices(
        ids.flatten().argsort(stable=True).int(), torch.tensor(tiles, dtype=torch.int32, device=ids.device).t()
    )


def max_tiles(choices: int, num_experts: int, tile_rows: int) -> int:
    """The most tiles that `choices` choices can need: every chosen expert begins a tile, and the others are full."""
    return min(choices, min(choices, num_experts) + choices // tile_rows)


@triton.jit
def _route_kernel(
    logits,
    ids,
    weights,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    TOP_K: tl.constexpr,
    PLACES: tl.constexpr,
    NORMALIZE: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK)
    place = tl.arange(0, PLACES)
    chosen = tl.zeros([PLACES], tl.int32)
    shares = tl.zeros([PLACES], tl.float32)
    pdl_wait(PDL)
    values = tl.load(logits + token * EXPERTS + offsets, mask=offsets < EXPERTS, other=-float("inf")).to(tl.float32)
    remaining = tl.exp(values - tl.max(values, 0))
    total = tl.sum(remaining, 0)
    for index in tl.static_range(TOP_K):
        share, best = tl.max(remaining, 0, return_indices=True)
        best = tl.minimum(best, EXPERTS - 1)  # among NaN none is the largest, and padding is no expert
        chosen = tl.where(place == index, best, chosen)
        shares = tl.where(place == index, share, shares)
        remaining = tl.where(offsets == best, -1.0, remaining)
    shares /= tl.sum(shares, 0) if NORMALIZE else total
    tl.store(ids + token * TOP_K + place, chosen, mask=place < TOP_K)
    tl.store(weights + token * TOP_K + place, shares, mask=place < TOP_K)


@triton.jit(do_not_specialize=["num_choices", "num_tiles"])
def _sort_kernel(
    ids,
    choices,
    tiles,
    num_choices,
    num_tiles,
    BINS: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILES: tl.constexpr,
    PDL: tl.constexpr,
):
    expert = tl.program_id(0)
    bins = tl.arange(0, BINS)
    offsets = tl.arange(0, CHUNK)
    counts = tl.zeros([BINS], tl.int32)
    pdl_wait(PDL)
    for start in range(0, num_choices, CHUNK):
        valid = start + offsets < num_choices
        counts += tl.histogram(tl.load(ids + start + offsets, mask=valid, other=0), BINS, mask=valid)
    tile_counts = (counts + TILE_ROWS - 1) // TILE_ROWS
    begin = tl.sum(tl.where(bins < expert, counts, 0), 0)
    end = begin + tl.sum(tl.where(bins == expert, counts, 0), 0)
    tile = tl.sum(tl.where(bins < expert, tile_counts, 0), 0)
    tile_offsets = tl.arange(0, TILES)
    for first in range(begin, end, TILES * TILE_ROWS):
        begins = first + tile_offsets * TILE_ROWS
        own = begins < end
        tl.store(tiles + tile + tile_offsets, expert, mask=own)
        tl.store(tiles + num_tiles + tile + tile_offsets, begins, mask=own)
        tl.store(tiles + 2 * num_tiles + tile + tile_offsets, end, mask=own)
        tile += TILES
    if expert == tl.num_programs(0) - 1:  # the remaining tiles are idle
        for idle in range(tl.sum(tile_counts, 0), num_tiles, TILES):
            for part in tl.static_range(3):
                tl.store(tiles + part * num_tiles + idle + tile_offsets, 0, mask=idle + tile_offsets < num_tiles)
    if begin < end:
        for start in range(0, num_choices, CHUNK):
            own = (tl.load(ids + start + offsets, mask=start + offsets < num_choices, other=-1) == expert).to(tl.int32)
            tl.store(choices + begin + tl.cumsum(own, 0) - 1, start + offsets, mask=own > 0)
            begin += tl.sum(own, 0)
