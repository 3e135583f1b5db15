"""Batch-invariant matrix products: a row of y = x W^T has the same bits alone and in any batch, at any place in it.

Libraries choose their kernel by the number of rows, and with it the order of additions. Here every element has one
accumulator that walks K upwards in blocks of one size: tiles differ in shape, never in the order of additions, and K is
never split. Tiles have 64 rows or more, so that all of them use the same matrix instruction (wgmma on Hopper). A caller
that does not need this may pass a tile of fewer rows, or split K (`matmul_partials`). Knows tensors only.

Operands in float8 have scales: for whole rows of x and of the weight, applied to the sums, or for each 128 inputs of a
row, applied to the sums of these as DeepSeek-V3 does (arXiv 2412.19437).
"""

# Pointers and scalars of a Triton kernel have no Python types:
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from mini_sglang.kernels.triton.pdl import pdl_launch, pdl_wait
from mini_sglang.kernels.triton.quantize_rows import GROUP
from mini_sglang.kernels.triton.split_k import sum_partials

_MIN_PROGRAMS = 128  # that a product should be cut into: about one for each multiprocessor of an H100
ROW_TILES = 8  # whose programs run one after the other, so that they find a column's weights in the L2 cache


@dataclass(frozen=True)
class MatmulTile:
    """The tile that one program computes. No field changes a bit of the result."""

    rows: int
    columns: int  # rows of the weight; in a gated product half of them are the gate's
    num_warps: int
    num_stages: int  # depth of the pipeline that loads x and the weights ahead


# deep pipelines where memory bandwidth is the limit, two programs per multiprocessor where they fit
MATMUL_TILES = (
    MatmulTile(64, 16, num_warps=4, num_stages=8),
    MatmulTile(64, 32, num_warps=4, num_stages=8),
    MatmulTile(64, 64, num_warps=4, num_stages=6),
    MatmulTile(64, 128, num_warps=4, num_stages=4),
    MatmulTile(128, 128, num_warps=8, num_stages=3),
    MatmulTile(128, 256, num_warps=8, num_stages=4),
)
FLOAT8_TILES = (
    *MATMUL_TILES[:4],
    MatmulTile(128, 64, num_warps=4, num_stages=5),
    MatmulTile(128, 128, num_warps=4, num_stages=4),
    MatmulTile(128, 256, num_warps=8, num_stages=3),
)
GROUPED_TILE = MatmulTile(64, 128, num_warps=4, num_stages=4)  # whose sums are kept twice in registers
_WITHOUT_TENSOR_CORES = MatmulTile(64, 32, num_warps=4, num_stages=2)


def matmul_tile(rows: int, columns: int, dtype: torch.dtype) -> MatmulTile:
    """The largest tile that still gives every multiprocessor work and is not half empty.

    Wide tiles are for many rows only, which hide how long a pipeline takes to fill.
    """
    if dtype.itemsize > 2:
        return _WITHOUT_TENSOR_CORES
    widest = 64 if rows <= 64 else 128 if rows <= 512 else 256
    fitting = [
        tile
        for tile in (FLOAT8_TILES if dtype.itemsize == 1 else MATMUL_TILES)
        if tile.rows < rows + 64 and tile.columns <= widest
    ]
    for tile in reversed(fitting):
        programs = triton.cdiv(rows, tile.rows) * triton.cdiv(columns, tile.columns)
        if programs >= (2 * _MIN_PROGRAMS if tile.columns == 256 else _MIN_PROGRAMS):
            return tile
    return MATMUL_TILES[0]


def matmul(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    *,
    scales: Scales | None = None,
    gated: bool = False,
    out: torch.Tensor | None = None,
    tile: MatmulTile | None = None,
    splits: int = 1,
) -> torch.Tensor:
    """x [rows, K], rows contiguous, times weight [N, K] contiguous, plus bias [N] and residual -> [rows, N]

    Summed in float32 and rounded once. All have one dtype, except that x and the weight may be float8_e4m3fn, with
    `scales`; the result is then bfloat16, or what `out` or the residual is. `residual` [rows, N] contiguous is
    overwritten and returned. Without one the result goes into `out` [rows, N], contiguous, if that is given.
    With `splits` K is cut into as many slices: see `split_k.py`.
    `gated`: weight [2 N, K] and bias [2 N] -> silu(first half) * second half [rows, N], of the float32 sums.
    Raises ValueError for layouts that the tensor memory accelerator (TMA) cannot read, and for `gated` with a residual.
    """
    if gated and (residual is not None or weight.shape[0] % 2):
        raise ValueError(f"`gated` needs a weight of two halves and no residual, got a weight {list(weight.shape)}")
    rows = len(x)
    columns = weight.shape[0] // 2 if gated else weight.shape[0]
    if residual is not None:
        out = residual
    _check(x, weight, out)
    if out is None:
        dtype = x.dtype if scales is None else torch.bfloat16
        out = torch.empty(rows, columns, dtype=dtype, device=x.device)
    if rows:
        is_grouped = scales is not None and scales.grouped
        tile = tile or (GROUPED_TILE if is_grouped else matmul_tile(rows, weight.shape[0], x.dtype))
        if splits > 1:
            partials = matmul_partials(x, weight, splits, scales=scales, tile=tile)
            return sum_partials(partials, out, bias, residual, gated=gated)
        _launch(x, weight, bias, residual, out, tile, scales=scales, gated=gated)
    return out


class Scales(NamedTuple):
    """x = scale * q for both operands of a product, by rows or by groups of 128 of a row's inputs. Both contiguous."""

    x: torch.Tensor  # [groups, rows] float32
    weight: torch.Tensor  # [groups, N] float32

    @property
    def grouped(self) -> bool:
        return len(self.x) > 1


def matmul_partials(
    x: torch.Tensor, weight: torch.Tensor, splits: int, *, tile: MatmulTile, scales: Scales | None = None
) -> torch.Tensor:
    """Partial sums of x [rows, K], rows contiguous, times weight [N, K] contiguous -> [splits, rows, N] float32

    K is cut into `splits` slices (split-K), so that few rows and columns keep every multiprocessor busy. The sum of
    the slices has the bits of `matmul` only by chance. Raises ValueError as `matmul` does.
    """
    _check(x, weight, None)
    out = torch.empty(splits, len(x), len(weight), dtype=torch.float32, device=x.device)
    if len(x):
        _launch(x, weight, None, None, out, tile, scales=scales, splits=splits)
    return out


def matmul_partials_reference(x: torch.Tensor, weight: torch.Tensor, splits: int) -> torch.Tensor:
    """The twin of `matmul_partials`, in float64."""
    depth = _split_depth(x.shape[1], splits, x.dtype)
    slices = zip(x.double().split(depth, 1), weight.double().split(depth, 1), strict=True)
    products = [of_x @ of_weight.t() for of_x, of_weight in slices]
    products += [torch.zeros_like(products[0])] * (splits - len(products))
    return torch.stack(products).float()


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    out: torch.Tensor,
    tile: MatmulTile,
    *,
    scales: Scales | None = None,
    gated: bool = False,
    splits: int = 1,
) -> None:
    """Launch the kernel. `out` is [rows, N], or [splits, rows, N] if there are several splits."""
    rows, depth = x.shape
    columns = out.shape[-1]
    block_columns = tile.columns // 2 if gated else tile.columns  # of the result
    block_depth = _block_depth(x.dtype)
    fills_a_tile = rows >= tile.rows
    _matmul_kernel[(triton.cdiv(rows, tile.rows) * triton.cdiv(columns, block_columns), splits)](
        TensorDescriptor.from_tensor(x, [tile.rows, block_depth]) if fills_a_tile else x,
        TensorDescriptor.from_tensor(weight.view(2, columns, depth), [2, block_columns, block_depth])
        if gated
        else TensorDescriptor.from_tensor(weight, [block_columns, block_depth]),
        bias,
        residual,
        None if scales is None else scales.x,
        None if scales is None else scales.weight,
        out,
        rows,
        columns,
        depth,
        _split_depth(depth, splits, x.dtype),
        x.stride(0),
        GATED=gated,
        GROUPED=scales is not None and scales.grouped,
        SPLIT_K=splits > 1,
        FILLS_A_TILE=fills_a_tile,
        BLOCK_ROWS=tile.rows,
        BLOCK_COLUMNS=block_columns,
        BLOCK_DEPTH=block_depth,
        ROW_TILES=ROW_TILES,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **pdl_launch(x.device),
    )


def _block_depth(dtype: torch.dtype) -> int:
    return {1: GROUP, 2: 64}.get(dtype.itemsize, 32)


def _split_depth(depth: int, splits: int, dtype: torch.dtype) -> int:
    """The part of K that one split takes, in whole blocks."""
    blocks = triton.cdiv(depth, _block_depth(dtype))
    return int(triton.cdiv(blocks, splits)) * _block_depth(dtype)


def matmul_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    *,
    scales: Scales | None = None,
    gated: bool = False,
) -> torch.Tensor:
    """The twin of `matmul`, in float64; it leaves `residual` as it is."""
    values, weights = x.double(), weight.double()
    if scales is not None:
        values, weights = _scaled(values, scales.x), _scaled(weights, scales.weight)
    product = values @ weights.t()
    for addend in (bias, residual):
        if addend is not None:
            product += addend.double()
    if gated:
        gate, up = product.chunk(2, dim=-1)
        product = F.silu(gate) * up
    return product.to(x.dtype if scales is None else torch.bfloat16)


def _scaled(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return values * scale.double().t().repeat_interleave(values.shape[1] // len(scale), 1)


def _check(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor | None) -> None:
    if weight.shape[1] != x.shape[1] or x.shape[1] % 16:
        raise ValueError(
            f"x {list(x.shape)} and weight {list(weight.shape)} must share their last dimension, a multiple of 16"
        )
    if x.stride(1) != 1 or x.stride(0) * x.dtype.itemsize % 16 or not weight.is_contiguous():
        raise ValueError(
            f"the rows of x must be contiguous and 16-byte aligned, weight contiguous; strides {x.stride()}"
        )
    if out is not None and not out.is_contiguous():
        raise ValueError("the residual and `out` must be contiguous")


@triton.jit
def swizzled_tile(row_tiles, column_tiles, ROW_TILES: tl.constexpr):
    """(row tile, column tile) of this program: ROW_TILES programs take one column, then as many take the next.

    So programs that run at the same time find the column's weights in the L2 cache.
    """
    band_programs = ROW_TILES * column_tiles
    first = tl.program_id(0) // band_programs * ROW_TILES
    height = tl.minimum(row_tiles - first, ROW_TILES)
    place = tl.program_id(0) % band_programs
    return first + place % height, place // height


@triton.jit(do_not_specialize=["rows", "split_depth"])
def _matmul_kernel(
    x,
    weight,
    bias,
    residual,
    x_scale,
    weight_scale,
    out,
    rows,
    columns,
    depth,
    split_depth,
    x_stride,
    GATED: tl.constexpr,
    GROUPED: tl.constexpr,
    SPLIT_K: tl.constexpr,
    FILLS_A_TILE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
    ROW_TILES: tl.constexpr,
    PDL: tl.constexpr,
):
    """`weight` is a tensor descriptor: what is outside reads as 0, which adds nothing. So is `x` with FILLS_A_TILE.

    With GATED the weight is [2, columns, depth], gate and up: a tile holds the same columns of both, for one tl.dot.
    With SPLIT_K a program walks one slice of K, and `out` has a partial sum for each slice. With GROUPED a block of K
    has its own scales.

    The TMA takes up to twice as long for a tile that is partly outside of x. So the last tile ends with the last row,
    and stores only the rows that no other tile stores; fewer rows than a tile has are read through pointers.
    """
    row_tile, column_tile = swizzled_tile(tl.cdiv(rows, BLOCK_ROWS), tl.cdiv(columns, BLOCK_COLUMNS), ROW_TILES)
    first_row = row_tile * BLOCK_ROWS
    if FILLS_A_TILE:
        first_row = tl.minimum(first_row, rows - BLOCK_ROWS)
    first_column = column_tile * BLOCK_COLUMNS
    row = first_row + tl.arange(0, BLOCK_ROWS)
    column = first_column + tl.arange(0, BLOCK_COLUMNS)
    k = tl.arange(0, BLOCK_DEPTH)
    acc = tl.zeros([BLOCK_ROWS, 2 * BLOCK_COLUMNS if GATED else BLOCK_COLUMNS], tl.float32)
    weight_row, is_weight_row = column, column < columns
    if GATED:  # gate's rows, then up's
        both = tl.arange(0, 2 * BLOCK_COLUMNS)
        is_weight_row = first_column + both % BLOCK_COLUMNS < columns
        weight_row = both // BLOCK_COLUMNS * columns + first_column + both % BLOCK_COLUMNS
    is_row = row < rows
    weight_rows = 2 * columns if GATED else columns
    first, end = 0, depth
    if SPLIT_K:
        first = tl.program_id(1) * split_depth
        end = tl.minimum(first + split_depth, depth)
        out += tl.program_id(1).to(tl.int64) * rows * columns
    pdl_wait(PDL)
    if GROUPED:  # scales are loaded a block ahead: nothing waits for them
        group = tl.minimum(first, depth - BLOCK_DEPTH) // BLOCK_DEPTH
        of_x = tl.load(x_scale + group * rows + row, mask=is_row, other=0.0)
        of_weight = tl.load(weight_scale + group * weight_rows + weight_row, mask=is_weight_row, other=0.0)
    for start in range(first, end, BLOCK_DEPTH):
        if FILLS_A_TILE:
            x_tile = x.load([first_row, start])
        else:
            inside = (row < rows)[:, None] & (start + k < depth)[None, :]
            x_tile = tl.load(x + row[:, None] * x_stride + (start + k)[None, :], mask=inside, other=0.0)
        if GATED:
            weight_tile = tl.reshape(weight.load([0, first_column, start]), [2 * BLOCK_COLUMNS, BLOCK_DEPTH])
        else:
            weight_tile = weight.load([first_column, start])
        if GROUPED:
            group = tl.minimum(start + BLOCK_DEPTH, end - BLOCK_DEPTH) // BLOCK_DEPTH
            next_x = tl.load(x_scale + group * rows + row, mask=is_row, other=0.0)
            next_weight = tl.load(weight_scale + group * weight_rows + weight_row, mask=is_weight_row, other=0.0)
            acc += tl.dot(x_tile, tl.trans(weight_tile)) * of_x[:, None] * of_weight[None, :]
            of_x = next_x
            of_weight = next_weight
        else:
            acc = tl.dot(x_tile, tl.trans(weight_tile), acc, input_precision="ieee")
    if x_scale is not None and not GROUPED:
        acc *= tl.load(x_scale + row, mask=is_row, other=0.0)[:, None]
        acc *= tl.load(weight_scale + weight_row, mask=is_weight_row, other=0.0)[None, :]
    own = (row >= row_tile * BLOCK_ROWS) & (row < rows)
    valid = own[:, None] & (column < columns)[None, :]
    places = row.to(tl.int64)[:, None] * columns + column[None, :]
    if GATED:  # every thread holds both elements of a pair
        acc, up = tl.split(tl.permute(tl.reshape(acc, [BLOCK_ROWS, 2, BLOCK_COLUMNS]), [0, 2, 1]))
    if bias is not None:
        acc += tl.load(bias + column, mask=column < columns, other=0.0).to(tl.float32)[None, :]
    if GATED:
        if bias is not None:
            up += tl.load(bias + columns + column, mask=column < columns, other=0.0).to(tl.float32)[None, :]
        acc = acc * tl.sigmoid(acc) * up
    if residual is not None:
        acc += tl.load(residual + places, mask=valid, other=0.0).to(tl.float32)
    tl.store(out + places, acc.to(out.dtype.element_ty), mask=valid)
