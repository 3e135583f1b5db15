"""The products of a mixture of experts: each token's row meets the weights of the experts chosen for it, and no others.

A program computes a tile: rows that chose one expert, times some of its columns. Tiles are listed on the device
(`routing.py`) and the grid has room for the most there can be, so a step lies in a CUDA graph whatever is chosen; idle
programs end at once. The first product gathers its rows from the tokens and ends with the gate, the second writes one
row per choice, and `combine` adds a token's rows in the order of its choices. Every sum runs along K in one order,
without splits and atomics. (Products grouped this way: Gale et al., MegaBlocks, arXiv 2211.15841.) Beside it all stands
the PyTorch twin. Knows tensors only.
"""

# Pointers and scalars of a Triton kernel have no Python types:
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from mini_sglang.kernels.triton.matmul import ROW_TILES, banded_tile
from mini_sglang.kernels.triton.pdl import pdl_launch, pdl_wait
from mini_sglang.kernels.triton.routing import ExpertOrder, most_tiles, sort_by_expert

_PROGRAMS = 264  # what a product should at least be cut into: two programs for each multiprocessor of an H100
UNSORTED_TOKENS = 2  # of so few tokens each choice is a tile: hardly two of them meet in an expert
_COMBINE_BLOCK = 1024


@dataclass(frozen=True)
class ExpertTile:
    """What one program computes, and how.

    Tiles of 64 rows and more use one matrix instruction and have one depth: none of them changes a bit of the result.
    """

    rows: int
    columns: int  # rows of the weight; in the gated product half of them are the gate's
    depth: int  # of K per turn
    num_warps: int
    num_stages: int  # depth of the pipeline that loads rows and weights ahead


EXPERT_TILES = (
    ExpertTile(16, 32, 128, num_warps=4, num_stages=5),
    ExpertTile(16, 64, 128, num_warps=4, num_stages=5),
    ExpertTile(16, 128, 128, num_warps=4, num_stages=3),
    ExpertTile(32, 64, 128, num_warps=4, num_stages=4),
    ExpertTile(32, 128, 64, num_warps=4, num_stages=5),
    ExpertTile(64, 64, 64, num_warps=4, num_stages=5),
    ExpertTile(64, 128, 64, num_warps=4, num_stages=4),
    ExpertTile(128, 128, 64, num_warps=8, num_stages=3),
    ExpertTile(128, 256, 64, num_warps=8, num_stages=4),
)
_WITHOUT_TENSOR_CORES = ExpertTile(16, 64, 32, num_warps=4, num_stages=2)


def tile_rows(choices: int, num_experts: int, dtype: torch.dtype, *, deterministic: bool) -> int:
    """Twice what an expert gets on average, so that most experts' weights are read by one tile."""
    if dtype.itemsize > 2:
        return _WITHOUT_TENSOR_CORES.rows
    average = choices / min(choices, num_experts)
    heights = (64, 128) if deterministic else (16, 32, 64, 128)
    return next((height for height in heights if height >= 2 * average), 128)


def expert_tile(rows: int, choices: int, num_experts: int, columns: int, dtype: torch.dtype) -> ExpertTile:
    """The widest tile of so many rows that still gives every multiprocessor work; `columns` are an expert's."""
    if dtype.itemsize > 2:
        return _WITHOUT_TENSOR_CORES
    fitting = [tile for tile in EXPERT_TILES if tile.rows == rows]
    tiles = most_tiles(choices, num_experts, rows)
    return next(
        (tile for tile in reversed(fitting) if tiles * triton.cdiv(columns, tile.columns) >= _PROGRAMS), fitting[0]
    )


def experts(
    residual: torch.Tensor,
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    *,
    deterministic: bool = False,
) -> torch.Tensor:
    """Add to each token the sum over its k experts of weight * down(silu(gate(x)) * up(x)); returns `residual`.

    residual and x [T, hidden] of one dtype, ids [T, k] int32, weights [T, k] float32, gate_up [experts, 2 n, hidden]
    with gate above up, down [experts, hidden, n]; all contiguous. With `deterministic` a token's bits depend on that
    token alone. Raises ValueError for layouts that the memory engine cannot read.
    """
    _check(residual, x, ids, gate_up, down)
    if not len(x):
        return residual
    number, (num_experts, wide, _) = ids.numel(), gate_up.shape
    rows = tile_rows(number, num_experts, x.dtype, deterministic=deterministic)
    order = sort_by_expert(ids, num_experts, rows) if len(x) > UNSORTED_TOKENS else None
    first = expert_tile(rows, number, num_experts, wide, x.dtype)
    second = expert_tile(rows, number, num_experts, down.shape[1], x.dtype)
    gated = expert_product(x, gate_up, ids, order, first, gated=True)
    outputs = expert_product(gated, down, ids, order, second, gated=False)
    return combine(residual, outputs, weights)


def experts_reference(
    residual: torch.Tensor,
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
) -> torch.Tensor:
    """The twin of `experts`, in float64, expert by expert; it leaves `residual` as it is."""
    out = residual.double()
    for expert in ids.unique().tolist():
        tokens, places = (ids == expert).nonzero(as_tuple=True)
        gate, up = (x[tokens].double() @ gate_up[expert].double().t()).chunk(2, -1)
        product = (F.silu(gate) * up) @ down[expert].double().t()
        out.index_add_(0, tokens, product * weights[tokens, places].double().unsqueeze(1))
    return out.to(residual.dtype)


def expert_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    ids: torch.Tensor,
    order: ExpertOrder | None,
    tile: ExpertTile,
    *,
    gated: bool,
) -> torch.Tensor:
    """The product of each choice's row with its expert's weight. ids [T, k]; without `order` each choice is a tile.

    `gated`: x [T, K], weight [experts, 2 n, K] -> silu(first half) * second half [T * k, n], rows by expert
    else: x [T * k, K], rows by expert, weight [experts, n, K] -> [T * k, n], rows by token and place
    """
    number, (num_experts, wide, depth) = ids.numel(), weight.shape
    columns, block = (wide // 2, tile.columns // 2) if gated else (wide, tile.columns)
    num_tiles = number if order is None else order.tiles.shape[1]
    out = torch.empty(number, columns, dtype=x.dtype, device=x.device)
    _grouped_matmul_kernel[(num_tiles * triton.cdiv(columns, block),)](
        x,
        TensorDescriptor.from_tensor(weight.view(num_experts * wide, depth), [block, tile.depth]),
        ids if order is None else order.choices,
        ids if order is None else order.tiles,
        out,
        num_tiles,
        COLUMNS=columns,
        DEPTH=depth,
        TOP_K=ids.shape[1],
        GATED=gated,
        SORTED=order is not None,
        BLOCK_ROWS=tile.rows,
        BLOCK_COLUMNS=block,
        BLOCK_DEPTH=tile.depth,
        ROW_TILES=ROW_TILES,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **pdl_launch(x.device),
    )
    return out


def combine(residual: torch.Tensor, outputs: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """residual [T, size] += the weighted sum of each token's k rows of outputs [T * k, size]; weights [T, k] float32"""
    tokens, size = residual.shape
    _combine_kernel[(tokens * triton.cdiv(size, _COMBINE_BLOCK),)](
        residual,
        outputs,
        weights,
        SIZE=size,
        TOP_K=weights.shape[1],
        BLOCK=_COMBINE_BLOCK,
        num_warps=4,
        **pdl_launch(residual.device),
    )
    return residual


def _check(
    residual: torch.Tensor, x: torch.Tensor, ids: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> None:
    hidden, size = gate_up.shape[2], down.shape[2]
    if hidden % 16 or size % 16:
        raise ValueError(f"the sizes of experts must be multiples of 16, got {hidden} and {size}")
    if x.shape[1] != hidden or gate_up.shape[1] != 2 * size or down.shape[:2] != (gate_up.shape[0], hidden):
        shapes = [list(tensor.shape) for tensor in (x, gate_up, down)]
        raise ValueError(f"x, gate_up and down do not fit each other: {shapes}")
    if not all(tensor.is_contiguous() for tensor in (residual, x, ids, gate_up, down)):
        raise ValueError("residual, x, ids and the weights must be contiguous")


@triton.jit(do_not_specialize=["num_tiles"])
def _grouped_matmul_kernel(
    x,
    weight,
    choices,
    tiles,
    out,
    num_tiles,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    TOP_K: tl.constexpr,
    GATED: tl.constexpr,
    SORTED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
    ROW_TILES: tl.constexpr,
    PDL: tl.constexpr,
):
    """weight is a tensor descriptor over all experts' rows: columns beyond the last are computed and not stored."""
    tile, column_tile = banded_tile(num_tiles, tl.cdiv(COLUMNS, BLOCK_COLUMNS), ROW_TILES)
    first_column = column_tile * BLOCK_COLUMNS
    if GATED:
        pdl_wait(PDL)
    if SORTED:
        expert = tl.load(tiles + tile)
        begin = tl.load(tiles + num_tiles + tile)
        end = tl.load(tiles + 2 * num_tiles + tile)
    else:
        expert = tl.load(choices + tile)
        begin = tile
        end = tile + 1
    if not GATED:
        pdl_wait(PDL)  # only now: what was chosen was written two kernels ago
    if begin >= end:
        return
    first_weight = expert * (2 * COLUMNS if GATED else COLUMNS) + first_column
    # an expert's last rows often fill no half of a large tile, which then costs half
    if BLOCK_ROWS > 64:  # noqa: SIM102  (known when compiled, the other is not)
        if end - begin <= BLOCK_ROWS // 2:
            _compute_tile(
                x, weight, choices, out, begin, end, first_weight, first_column,
                COLUMNS, DEPTH, TOP_K, GATED, SORTED, BLOCK_ROWS // 2, BLOCK_COLUMNS, BLOCK_DEPTH,
            )  # fmt: skip
            return
    _compute_tile(
        x, weight, choices, out, begin, end, first_weight, first_column,
        COLUMNS, DEPTH, TOP_K, GATED, SORTED, BLOCK_ROWS, BLOCK_COLUMNS, BLOCK_DEPTH,
    )  # fmt: skip


@triton.jit
def _compute_tile(
    x,
    weight,
    choices,
    out,
    begin,
    end,
    first_weight,
    first_column,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    TOP_K: tl.constexpr,
    GATED: tl.constexpr,
    SORTED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
):
    """The rows from `begin` on, of which those before `end` are the expert's, times BLOCK_COLUMNS of its columns"""
    at_row = begin + tl.arange(0, ROWS)
    there = at_row < end
    choice = tl.load(choices + at_row, mask=there, other=0) if SORTED else at_row
    source = choice // TOP_K if GATED else at_row  # the first product gathers tokens,
    target = at_row if GATED else choice  # the second leaves the order of experts
    at_depth = tl.arange(0, BLOCK_DEPTH)
    rows = x + source.to(tl.int64)[:, None] * DEPTH + at_depth[None, :]
    acc = tl.zeros([ROWS, BLOCK_COLUMNS], tl.float32)
    acc_up = tl.zeros([ROWS, BLOCK_COLUMNS], tl.float32)
    for start in range(0, DEPTH, BLOCK_DEPTH):
        mask = there[:, None] if DEPTH % BLOCK_DEPTH == 0 else there[:, None] & (start + at_depth < DEPTH)[None, :]
        values = tl.load(rows + start, mask=mask, other=0.0)
        acc = tl.dot(values, tl.trans(weight.load([first_weight, start])), acc, input_precision="ieee")
        if GATED:
            up = weight.load([first_weight + COLUMNS, start])
            acc_up = tl.dot(values, tl.trans(up), acc_up, input_precision="ieee")
    if GATED:
        acc = acc * tl.sigmoid(acc) * acc_up
    at_column = first_column + tl.arange(0, BLOCK_COLUMNS)
    places = target.to(tl.int64)[:, None] * COLUMNS + at_column[None, :]
    tl.store(out + places, acc.to(out.dtype.element_ty), mask=there[:, None] & (at_column < COLUMNS)[None, :])


@triton.jit
def _combine_kernel(
    residual,
    outputs,
    weights,
    SIZE: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    BLOCKS: tl.constexpr = tl.cdiv(SIZE, BLOCK)
    token = (tl.program_id(0) // BLOCKS).to(tl.int64)
    at = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    there = at < SIZE
    acc = tl.zeros([BLOCK], tl.float32)
    pdl_wait(PDL)
    for place in tl.static_range(TOP_K):
        choice = token * TOP_K + place
        acc += tl.load(weights + choice) * tl.load(outputs + choice * SIZE + at, mask=there, other=0.0).to(tl.float32)
    acc += tl.load(residual + token * SIZE + at, mask=there, other=0.0).to(tl.float32)
    tl.store(residual + token * SIZE + at, acc.to(residual.dtype.element_ty), mask=there)
