"""The grouped matrix products of a mixture of experts whose weights have 4 or 8 bits, and activations are as they are.

The same grid, tiles of rows and order of sums as in `experts.py`; what a program does with its tile is the loop of
`weight_only.py`: a group of inputs at a time is converted in registers, and its sum multiplied by its scale. Beside the
PyTorch twin.
"""

# Pointers and scalars of a Triton kernel have no Python types:
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mini_sglang.kernels.interface import PLAIN_EXPERTS, ExpertVariant
from mini_sglang.kernels.triton.experts import (
    UNSORTED_TOKENS,
    clamp_constants,
    combine,
    experts_reference,
    gated_product,
    rows_of_tile,
    source_and_target,
    tile_rows,
)
from mini_sglang.kernels.triton.matmul import ROW_TILES, swizzled_tile
from mini_sglang.kernels.triton.pdl import pdl_launch, pdl_wait
from mini_sglang.kernels.triton.quantized_gemv import PackedWeight
from mini_sglang.kernels.triton.routing import SortedChoices, sort_by_expert
from mini_sglang.kernels.triton.weight_only import (
    INVARIANT_TILE,
    WeightOnlyTile,
    weight_only_sums,
    weight_only_tile,
)


def quantized_expert_tile(choices: int, num_experts: int, dtype: torch.dtype, *, deterministic: bool) -> WeightOnlyTile:
    """As many rows as `experts` takes, up to 64; one tile for all steps with `deterministic`."""
    if deterministic:
        return INVARIANT_TILE
    return weight_only_tile(tile_rows(choices, num_experts, dtype, deterministic=False))


def quantized_experts(
    residual: torch.Tensor,
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: PackedWeight,
    down: PackedWeight,
    number: int,
    variant: ExpertVariant = PLAIN_EXPERTS,
    *,
    deterministic: bool = False,
    tile: WeightOnlyTile | None = None,
) -> torch.Tensor:
    """`experts` with packed weights of `number` experts, one below the other; returns `residual`.

    residual and x [T, hidden] of one dtype, ids [T, k] int32, weights [T, k] float32, all contiguous; gate_up
    [experts * 2 n, hidden] with each gate above its up, down [experts * hidden, n]. With `deterministic` a token's bits
    depend on that token alone. Raises ValueError for other layouts.
    """
    _check(residual, x, ids, gate_up, down, number)
    if not len(x):
        return residual
    tile = tile or quantized_expert_tile(ids.numel(), number, x.dtype, deterministic=deterministic)
    sorted_choices = sort_by_expert(ids, number, tile.rows) if len(x) > UNSORTED_TOKENS else None
    gated = grouped_weight_only_matmul(x, gate_up, number, ids, sorted_choices, tile, variant, gated=True)
    outputs = grouped_weight_only_matmul(gated, down, number, ids, sorted_choices, tile, variant, gated=False)
    return combine(residual, outputs, weights)


def quantized_experts_reference(
    residual: torch.Tensor,
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: PackedWeight,
    down: PackedWeight,
    number: int,
    variant: ExpertVariant = PLAIN_EXPERTS,
) -> torch.Tensor:
    """The twin of `quantized_experts`, in float64; it leaves `residual` as it is."""
    dense_gate_up, dense_down = (weight.dense(torch.float32).unflatten(0, (number, -1)) for weight in (gate_up, down))
    return experts_reference(residual, x, ids, weights, dense_gate_up, dense_down, variant)


def grouped_weight_only_matmul(
    x: torch.Tensor,
    weight: PackedWeight,
    number: int,
    ids: torch.Tensor,
    sorted_choices: SortedChoices | None,
    tile: WeightOnlyTile,
    variant: ExpertVariant = PLAIN_EXPERTS,
    *,
    gated: bool,
) -> torch.Tensor:
    """`grouped_matmul` with a packed weight of `number` experts, one below the other."""
    wide, depth = weight.shape[0] // number, weight.shape[1]
    columns, num_choices = wide // 2 if gated else wide, ids.numel()
    num_tiles = num_choices if sorted_choices is None else sorted_choices.tiles.shape[1]
    out = torch.empty(num_choices, columns, dtype=x.dtype, device=x.device)
    _grouped_weight_only_kernel[(num_tiles * triton.cdiv(columns, tile.columns),)](
        x,
        weight.q,
        weight.scale,
        weight.minimum,
        ids if sorted_choices is None else sorted_choices.choices,
        ids if sorted_choices is None else sorted_choices.tiles,
        variant.gate_up_bias if gated else variant.down_bias,
        out,
        num_tiles,
        OUTPUTS=columns,
        DEPTH=depth,
        GROUP=weight.group_size,
        BITS=weight.bits,
        ZERO=weight.zero,
        TOP_K=ids.shape[1],
        GATED=gated,
        **clamp_constants(variant.clamp),
        SORTED=sorted_choices is not None,
        ASM=x.is_cuda and x.dtype == torch.bfloat16,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        BLOCK_DEPTH=weight.block,
        ROW_TILES=ROW_TILES,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **pdl_launch(x.device),
    )
    return out


def _check(
    residual: torch.Tensor, x: torch.Tensor, ids: torch.Tensor, gate_up: PackedWeight, down: PackedWeight, number: int
) -> None:
    wide, hidden = gate_up.shape
    if x.shape[1] != hidden or down.shape[0] != number * hidden or wide != 2 * number * down.shape[1]:
        raise ValueError(f"x, gate_up and down do not fit each other: {list(x.shape)}, {gate_up.shape}, {down.shape}")
    if not all(tensor.is_contiguous() for tensor in (residual, x, ids)):
        raise ValueError("residual, x and ids must be contiguous")


@triton.jit(do_not_specialize=["num_tiles"])
def _grouped_weight_only_kernel(
    x,
    weight,
    scale,
    minimum,
    choices,
    tiles,
    bias,
    out,
    num_tiles,
    OUTPUTS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    ZERO: tl.constexpr,
    TOP_K: tl.constexpr,
    GATED: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    SORTED: tl.constexpr,
    ASM: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
    ROW_TILES: tl.constexpr,
    PDL: tl.constexpr,
):
    tile, column_tile = swizzled_tile(num_tiles, tl.cdiv(OUTPUTS, COLUMNS), ROW_TILES)
    if GATED:
        pdl_wait(PDL)
    expert, begin, end = rows_of_tile(choices, tiles, tile, num_tiles, SORTED)
    if not GATED:
        pdl_wait(PDL)  # only now: the choices, read above, were written two kernels ago
    if begin >= end:
        return
    row = begin + tl.arange(0, ROWS)
    is_row = row < end
    source, target = source_and_target(choices, row, is_row, TOP_K, GATED, SORTED)
    column = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < OUTPUTS
    first = expert * (2 * OUTPUTS if GATED else OUTPUTS)
    acc, acc_up = weight_only_sums(
        x + source.to(tl.int64)[None, :] * DEPTH, is_row[None, :], weight, scale, minimum, first + column, is_column,
        OUTPUTS, DEPTH, GROUP, BITS, ZERO, GATED, ASM, ROWS, COLUMNS, BLOCK_DEPTH,
    )  # fmt: skip
    if bias is not None:
        acc += tl.load(bias + first + column, mask=is_column, other=0.0).to(tl.float32)[:, None]
        if GATED:
            acc_up += tl.load(bias + first + OUTPUTS + column, mask=is_column, other=0.0).to(tl.float32)[:, None]
    if GATED:
        acc = gated_product(acc, acc_up, ALPHA, LIMIT)
    places = target.to(tl.int64)[None, :] * OUTPUTS + column[:, None]
    tl.store(out + places, acc.to(out.dtype.element_ty), mask=is_row[None, :] & is_column[:, None])
