"""The grouped matrix products of a mixture of experts: each token is multiplied with its own experts' weights only.

A program computes a tile: rows that chose one expert, times some of its columns. `routing.py` lists the tiles on the
device, and the grid has room for as many as there can be, so a step can be captured in a CUDA graph whatever is chosen;
programs without a tile end at once. The first product gathers its rows from the tokens and applies the gate, the second
writes one row per choice, and `combine` adds a token's rows in the order of its choices. Every sum runs along K in one
order, without split-K or atomics. (Products grouped this way: Gale et al., MegaBlocks, arXiv 2211.15841.) Each function
stands beside its PyTorch twin.
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

from mini_sglang.kernels.interface import PLAIN_EXPERTS, Clamp, ExpertVariant
from mini_sglang.kernels.triton.matmul import ROW_TILES, swizzled_tile
from mini_sglang.kernels.triton.pdl import pdl_launch, pdl_wait
from mini_sglang.kernels.triton.routing import SortedChoices, max_tiles, sort_by_expert

_MIN_PROGRAMS = 264  # that a product should be cut into: two for each multiprocessor of an H100
UNSORTED_TOKENS = 2  # up to this many, each choice is a tile of its own: two choices hardly ever share an expert
_COMBINE_BLOCK = 1024


@dataclass(frozen=True)
class ExpertTile:
    """The tile that one program computes.

    All tiles of 64 rows or more use one matrix instruction and one depth, so which of them is used changes no bit of
    the result.
    """

    rows: int
    columns: int  # rows of the weight; in the gated product half of them are the gate's
    depth: int  # of K per iteration
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
    """Rows of a tile: at least twice what an expert gets on average, so that one tile reads most experts' weights."""
    if dtype.itemsize > 2:
        return _WITHOUT_TENSOR_CORES.rows
    average = choices / min(choices, num_experts)
    heights = (64, 128) if deterministic else (16, 32, 64, 128)
    return next((height for height in heights if height >= 2 * average), 128)


def expert_tile(rows: int, choices: int, num_experts: int, columns: int, dtype: torch.dtype) -> ExpertTile:
    """The widest tile of `rows` rows that still gives every multiprocessor work; `columns` are those of one expert."""
    if dtype.itemsize > 2:
        return _WITHOUT_TENSOR_CORES
    fitting = [tile for tile in EXPERT_TILES if tile.rows == rows]
    tiles = max_tiles(choices, num_experts, rows)
    return next(
        (tile for tile in reversed(fitting) if tiles * triton.cdiv(columns, tile.columns) >= _MIN_PROGRAMS), fitting[0]
    )


def experts(
    residual: torch.Tensor,
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    variant: ExpertVariant = PLAIN_EXPERTS,
    *,
    deterministic: bool = False,
) -> torch.Tensor:
    """Add to each token the sum over its k experts of weight * down(silu(gate(x)) * up(x)); returns `residual`.

    residual and x [T, hidden] of one dtype, ids [T, k] int32, weights [T, k] float32, gate_up [experts, 2 n, hidden]
    with gate above up, down [experts, hidden, n]; all contiguous. `variant` has biases and another gate. With
    `deterministic` a token's bits depend on that token alone. Raises ValueError for shapes and layouts that the tensor
    memory accelerator (TMA) cannot read.
    """
    _check(residual, x, ids, gate_up, down)
    if not len(x):
        return residual
    num_choices, (num_experts, wide, _) = ids.numel(), gate_up.shape
    rows = tile_rows(num_choices, num_experts, x.dtype, deterministic=deterministic)
    sorted_choices = sort_by_expert(ids, num_experts, rows) if len(x) > UNSORTED_TOKENS else None
    first = expert_tile(rows, num_choices, num_experts, wide, x.dtype)
    second = expert_tile(rows, num_choices, num_experts, down.shape[1], x.dtype)
    gated = grouped_matmul(x, gate_up, ids, sorted_choices, first, variant, gated=True)
    outputs = grouped_matmul(gated, down, ids, sorted_choices, second, variant, gated=False)
    return combine(residual, outputs, weights)


def experts_reference(
    residual: torch.Tensor,
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    variant: ExpertVariant = PLAIN_EXPERTS,
) -> torch.Tensor:
    """The twin of `experts`, in float64, one expert after another; it leaves `residual` as it is."""
    gate_up_bias, down_bias, clamp = variant
    out = residual.double()
    for expert in ids.unique().tolist():
        tokens, places = (ids == expert).nonzero(as_tuple=True)
        both = x[tokens].double() @ gate_up[expert].double().t()
        gate, up = (both if gate_up_bias is None else both + gate_up_bias[expert]).chunk(2, -1)
        if clamp is None:
            gated = F.silu(gate) * up
        else:
            gate = gate.clamp(max=clamp.limit)
            gated = gate * torch.sigmoid(clamp.alpha * gate) * (up.clamp(-clamp.limit, clamp.limit) + 1)
        product = gated @ down[expert].double().t()
        product = product if down_bias is None else product + down_bias[expert]
        out.index_add_(0, tokens, product * weights[tokens, places].double().unsqueeze(1))
    return out.to(residual.dtype)


def grouped_matmul(
    x: torch.Tensor,
    weight: torch.Tensor,
    ids: torch.Tensor,
    sorted_choices: SortedChoices | None,
    tile: ExpertTile,
    variant: ExpertVariant = PLAIN_EXPERTS,
    *,
    gated: bool,
) -> torch.Tensor:
    """Multiply each choice's row with the weight of its expert.

    ids [T, k]; without `sorted_choices` each choice is a tile of its own
    `gated`: x [T, K], weight [experts, 2 n, K] -> silu(first half) * second half [T * k, n], rows by expert
    else: x [T * k, K], rows by expert, weight [experts, n, K] -> [T * k, n], rows by token and place
    """
    num_choices, (num_experts, wide, depth) = ids.numel(), weight.shape
    columns, block = (wide // 2, tile.columns // 2) if gated else (wide, tile.columns)
    num_tiles = num_choices if sorted_choices is None else sorted_choices.tiles.shape[1]
    out = torch.empty(num_choices, columns, dtype=x.dtype, device=x.device)
    _grouped_matmul_kernel[(num_tiles * triton.cdiv(columns, block),)](
        x,
        TensorDescriptor.from_tensor(weight.view(num_experts * wide, depth), [block, tile.depth]),
        ids if sorted_choices is None else sorted_choices.choices,
        ids if sorted_choices is None else sorted_choices.tiles,
        variant.gate_up_bias if gated else variant.down_bias,
        out,
        num_tiles,
        COLUMNS=columns,
        DEPTH=depth,
        TOP_K=ids.shape[1],
        GATED=gated,
        **clamp_constants(variant.clamp),
        SORTED=sorted_choices is not None,
        BLOCK_ROWS=tile.rows,
        BLOCK_COLUMNS=block,
        BLOCK_DEPTH=tile.depth,
        ROW_TILES=ROW_TILES,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **pdl_launch(x.device),
    )
    return out


def clamp_constants(clamp: Clamp | None) -> dict[str, float | None]:
    """ALPHA and LIMIT of a kernel, None unless the gate is clamped."""
    return {"ALPHA": None, "LIMIT": None} if clamp is None else {"ALPHA": clamp.alpha, "LIMIT": clamp.limit}


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
    bias,
    out,
    num_tiles,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    TOP_K: tl.constexpr,
    GATED: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    SORTED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
    ROW_TILES: tl.constexpr,
    PDL: tl.constexpr,
):
    """`weight` is a tensor descriptor over all experts' rows; columns beyond an expert's last are not stored."""
    tile, column_tile = swizzled_tile(num_tiles, tl.cdiv(COLUMNS, BLOCK_COLUMNS), ROW_TILES)
    first_column = column_tile * BLOCK_COLUMNS
    if GATED:
        pdl_wait(PDL)
    expert, begin, end = rows_of_tile(choices, tiles, tile, num_tiles, SORTED)
    if not GATED:
        pdl_wait(PDL)  # only now: the choices, read above, were written two kernels ago
    if begin >= end:
        return
    first_weight = expert * (2 * COLUMNS if GATED else COLUMNS) + first_column
    # an expert's last rows often fill less than half of a large tile: half a tile is enough then
    if BLOCK_ROWS > 64:  # noqa: SIM102  (known when compiled, the other is not)
        if end - begin <= BLOCK_ROWS // 2:
            _compute_tile(
                x, weight, choices, bias, out, begin, end, first_weight, first_column,
                COLUMNS, DEPTH, TOP_K, GATED, ALPHA, LIMIT, SORTED, BLOCK_ROWS // 2, BLOCK_COLUMNS, BLOCK_DEPTH,
            )  # fmt: skip
            return
    _compute_tile(
        x, weight, choices, bias, out, begin, end, first_weight, first_column,
        COLUMNS, DEPTH, TOP_K, GATED, ALPHA, LIMIT, SORTED, BLOCK_ROWS, BLOCK_COLUMNS, BLOCK_DEPTH,
    )  # fmt: skip


@triton.jit
def rows_of_tile(choices, tiles, tile, num_tiles, SORTED: tl.constexpr):
    """The expert of a tile, its first row and the end of its rows, which is 0 if the tile is idle."""
    if SORTED:
        return tl.load(tiles + tile), tl.load(tiles + num_tiles + tile), tl.load(tiles + 2 * num_tiles + tile)
    return tl.load(choices + tile), tile, tile + 1


@triton.jit
def source_and_target(choices, row, valid, TOP_K: tl.constexpr, GATED: tl.constexpr, SORTED: tl.constexpr):
    """Where rows come from and go to: the first product gathers them from tokens, the second brings them back."""
    choice = tl.load(choices + row, mask=valid, other=0) if SORTED else row
    if GATED:
        return choice // TOP_K, row
    return row, choice


@triton.jit
def gated_product(gate, up, ALPHA: tl.constexpr, LIMIT: tl.constexpr):
    """silu(gate) * up, or with a LIMIT what `Clamp` says"""
    if LIMIT is None:
        gated = gate * tl.sigmoid(gate) * up
    else:
        gate = tl.minimum(gate, LIMIT)
        gated = gate * tl.sigmoid(ALPHA * gate) * (tl.maximum(tl.minimum(up, LIMIT), -LIMIT) + 1.0)
    return gated


@triton.jit
def _compute_tile(
    x,
    weight,
    choices,
    bias,
    out,
    begin,
    end,
    first_weight,
    first_column,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    TOP_K: tl.constexpr,
    GATED: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    SORTED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
):
    """Multiply rows from `begin` on with BLOCK_COLUMNS columns of an expert; the rows before `end` are the expert's."""
    row = begin + tl.arange(0, ROWS)
    valid = row < end
    source, target = source_and_target(choices, row, valid, TOP_K, GATED, SORTED)
    k = tl.arange(0, BLOCK_DEPTH)
    rows = x + source.to(tl.int64)[:, None] * DEPTH + k[None, :]
    acc = tl.zeros([ROWS, BLOCK_COLUMNS], tl.float32)
    acc_up = tl.zeros([ROWS, BLOCK_COLUMNS], tl.float32)
    for start in range(0, DEPTH, BLOCK_DEPTH):
        mask = valid[:, None] if DEPTH % BLOCK_DEPTH == 0 else valid[:, None] & (start + k < DEPTH)[None, :]
        values = tl.load(rows + start, mask=mask, other=0.0)
        acc = tl.dot(values, tl.trans(weight.load([first_weight, start])), acc, input_precision="ieee")
        if GATED:
            up = weight.load([first_weight + COLUMNS, start])
            acc_up = tl.dot(values, tl.trans(up), acc_up, input_precision="ieee")
    column = first_column + tl.arange(0, BLOCK_COLUMNS)
    if bias is not None:
        place = bias + first_weight + tl.arange(0, BLOCK_COLUMNS)
        acc += tl.load(place, mask=column < COLUMNS, other=0.0).to(tl.float32)[None, :]
        if GATED:
            acc_up += tl.load(place + COLUMNS, mask=column < COLUMNS, other=0.0).to(tl.float32)[None, :]
    if GATED:
        acc = gated_product(acc, acc_up, ALPHA, LIMIT)
    places = target.to(tl.int64)[:, None] * COLUMNS + column[None, :]
    tl.store(out + places, acc.to(out.dtype.element_ty), mask=valid[:, None] & (column < COLUMNS)[None, :])


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
    offsets = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    valid = offsets < SIZE
    acc = tl.zeros([BLOCK], tl.float32)
    pdl_wait(PDL)
    for place in tl.static_range(TOP_K):
        choice = token * TOP_K + place
        row = tl.load(outputs + choice * SIZE + offsets, mask=valid, other=0.0).to(tl.float32)
        acc += tl.load(weights + choice) * row
    acc += tl.load(residual + token * SIZE + offsets, mask=valid, other=0.0).to(tl.float32)
    tl.store(residual + token * SIZE + offsets, acc.to(residual.dtype.element_ty), mask=valid)
