"""Matrix products with a weight in 4 or 8 bits and activations as they are, for more rows than `quantized_gemv` takes.

A program multiplies a group of inputs at a time: integers are exact in 16 bits, and the group's sum is multiplied by
its scale. Groups are added up in one order: with tiles of one shape a row has the same bits in any batch. For very many
rows it is faster to write the weight out once (`dequantize`) and leave the product to the library. Beside their PyTorch
twins.
"""

# Pointers and scalars of a Triton kernel have no Python types:
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from mini_sglang.kernels.triton.matmul import ROW_TILES, matmul_reference, swizzled_tile
from mini_sglang.kernels.triton.pdl import pdl_launch, pdl_wait
from mini_sglang.kernels.triton.quantized_gemv import PackedWeight

_ELEMENTS = 2048  # of a program of `dequantize`, in stored bytes


@dataclass(frozen=True)
class WeightOnlyTile:
    """The tile that one program computes."""

    rows: int
    columns: int
    num_warps: int = 4
    num_stages: int = 4


INVARIANT_TILE = WeightOnlyTile(64, 64, num_stages=3)  # where a row's bits may not depend on the number of rows


def weight_only_tile(rows: int) -> WeightOnlyTile:
    """The fastest tile, measured on an H200 in bfloat16."""
    if rows <= 16:
        return WeightOnlyTile(16, 32, num_warps=2, num_stages=5)
    return WeightOnlyTile(32 if rows <= 32 else 64, 64, num_stages=3)


def weight_only_matmul(
    x: torch.Tensor,
    weight: PackedWeight,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    *,
    gated: bool = False,
    out: torch.Tensor | None = None,
    tile: WeightOnlyTile | None = None,
) -> torch.Tensor:
    """`matmul` with a packed weight: x [rows, K], rows contiguous -> [rows, N] in x's dtype, or [rows, N / 2] gated

    Raises ValueError for other layouts, and for `gated` with a residual.
    """
    rows = len(x)
    columns = weight.shape[0] // 2 if gated else weight.shape[0]
    if residual is not None:
        out = residual
    if x.stride(1) != 1 or (gated and residual is not None) or (out is not None and not out.is_contiguous()):
        raise ValueError(f"rows of x and the result must be contiguous, strides {x.stride()}; `gated` has no residual")
    if out is None:
        out = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    if not rows:
        return out
    tile = tile or weight_only_tile(rows)
    _weight_only_kernel[(triton.cdiv(rows, tile.rows) * triton.cdiv(columns, tile.columns),)](
        x,
        weight.q,
        weight.scale,
        weight.minimum,
        bias,
        residual,
        out,
        rows,
        columns,
        x.stride(0),
        DEPTH=x.shape[1],
        GROUP=weight.group_size,
        BITS=weight.bits,
        ZERO=weight.zero,
        GATED=gated,
        ASM=x.is_cuda and x.dtype == torch.bfloat16,
        BLOCK_ROWS=tile.rows,
        BLOCK_COLUMNS=tile.columns,
        BLOCK_DEPTH=weight.block,
        ROW_TILES=ROW_TILES,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **pdl_launch(x.device),
    )
    return out


def weight_only_matmul_reference(
    x: torch.Tensor,
    weight: PackedWeight,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    *,
    gated: bool = False,
) -> torch.Tensor:
    """The twin of `weight_only_matmul`, in float64; it leaves `residual` as it is."""
    return matmul_reference(x, weight.dense(torch.float32), bias, residual, gated=gated)


def dequantize(weight: PackedWeight, dtype: torch.dtype) -> torch.Tensor:
    """-> W [N, K]"""
    n, k = weight.shape
    out = torch.empty(n, k, dtype=dtype, device=weight.q.device)
    row_bytes = weight.q.shape[1]
    _dequantize_kernel[(n, triton.cdiv(row_bytes, _ELEMENTS))](
        weight.q,
        weight.scale,
        weight.minimum,
        out,
        ROW_BYTES=row_bytes,
        GROUP=weight.group_size,
        BITS=weight.bits,
        ZERO=weight.zero,
        BLOCK_DEPTH=weight.block,
        BLOCK=_ELEMENTS,
        num_warps=4,
        **pdl_launch(out.device),
    )
    return out


def _halves_ptx(zero: int) -> str:
    """Low halves of four bytes in $4 to $0 and $1, high halves to $2 and $3: pairs of bfloat16, less `zero`."""
    pairs = (("$0", "low", "0x4140"), ("$1", "low", "0x4342"), ("$2", "high", "0x4140"), ("$3", "high", "0x4342"))
    widen = "\n".join(f"prmt.b32 {pair}, {half}, 0x43434343, {select};" for pair, half, select in pairs)
    subtract = "\n".join(f"sub.rn.bf16x2 {pair}, {pair}, offset;" for pair, _, _ in pairs)
    return f"""
    {{
        .reg .b32 low, high, offset;
        and.b32 low, $4, 0x0f0f0f0f;
        shr.u32 high, $4, 4;
        and.b32 high, high, 0x0f0f0f0f;
        mov.b32 offset, 0x43{zero:02x}43{zero:02x};
        {widen}
        {subtract}
    }}
    """


# Four float8 in $2, as bfloat16 in $0 and $1: exponent and mantissa move to their places, and 2^120, the difference of
# the exponents' biases, is multiplied in.
_FLOAT8_PTX = tl.constexpr(
    """
    {
        .reg .b32 a, b, c, d, factor;
        prmt.b32 a, $2, 0, 0x1404;
        prmt.b32 b, $2, 0, 0x3424;
        and.b32 c, a, 0x7f007f00;
        and.b32 d, b, 0x7f007f00;
        shr.u32 c, c, 4;
        shr.u32 d, d, 4;
        lop3.b32 a, a, 0x80008000, c, 0xea;
        lop3.b32 b, b, 0x80008000, d, 0xea;
        mov.b32 factor, 0x7b807b80;
        mul.rn.bf16x2 $0, a, factor;
        mul.rn.bf16x2 $1, b, factor;
    }
    """
)
_HALVES_PTX = tl.constexpr(_halves_ptx(0))
_HALVES_LESS_8_PTX = tl.constexpr(_halves_ptx(8))


@triton.jit
def _halves(q, dtype: tl.constexpr, ZERO: tl.constexpr, ASM: tl.constexpr):
    """The low and the high half of each byte, less ZERO, in `dtype`.

    With ASM that is bfloat16: one with the exponent of 128 has seven bits for an integer, so none is converted.
    """
    if ASM:
        tl.static_assert(ZERO == 0 or ZERO == 8)
        low, high = tl.inline_asm_elementwise(
            _HALVES_PTX if ZERO == 0 else _HALVES_LESS_8_PTX,
            "=&r,=&r,=&r,=&r,r",
            [q],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    else:
        low, high = ((q & 15).to(tl.int8) - ZERO).to(dtype), ((q >> 4).to(tl.int8) - ZERO).to(dtype)
    return low, high  # one `return`: the compiler wants one type of all


@triton.jit
def _bytes(q, dtype: tl.constexpr, ASM: tl.constexpr):
    """Weights of 8 bits in `dtype`, exactly; with ASM that is bfloat16. No float8 may be NaN."""
    if ASM and q.dtype == tl.float8e4nv:
        values = tl.inline_asm_elementwise(_FLOAT8_PTX, "=r,=r,r", [q], dtype=tl.bfloat16, is_pure=True, pack=4)
    else:
        values = q.to(dtype)
    return values


@triton.jit
def _add_products(acc, x_low, x_high, q, factor, ZERO: tl.constexpr, BITS: tl.constexpr, ASM: tl.constexpr):
    """acc [columns, rows] + factor [columns], unless that is None, * q [columns, bytes] times x [bytes, rows]

    Of 4 bits x is in two halves.
    """
    sums = acc if factor is None else None
    if BITS == 4:
        low, high = _halves(q, x_low.dtype, ZERO, ASM)
        sums = tl.dot(low, x_low, sums, input_precision="ieee")
        sums = tl.dot(high, x_high, sums, input_precision="ieee")
    else:
        sums = tl.dot(_bytes(q, x_low.dtype, ASM), x_low, sums, input_precision="ieee")
    return sums if factor is None else acc + sums * factor.to(tl.float32)[:, None]


@triton.jit
def weight_only_sums(
    of_rows,
    is_row,
    weight,
    scale,
    minimum,
    output,
    is_output,
    up_rows,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    ZERO: tl.constexpr,
    GATED: tl.constexpr,
    ASM: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
):
    """Products of rows of x, `of_rows` [1, ROWS] pointers, with rows `output` [COLUMNS] of a packed weight.

    With GATED also with those that lie `up_rows` below. -> two of [COLUMNS, ROWS] float32, transposed: with weights
    first, converted ones go to the tensor cores from registers.
    """
    ROW_BYTES: tl.constexpr = DEPTH * BITS // 8
    BLOCK_BYTES: tl.constexpr = BLOCK_DEPTH * BITS // 8
    GROUPS: tl.constexpr = (DEPTH + GROUP - 1) // GROUP
    byte = tl.arange(0, BLOCK_BYTES)
    of_x = of_rows + byte[:, None]
    of_weight = weight + output.to(tl.int64)[:, None] * ROW_BYTES + byte[None, :]
    of_groups = output.to(tl.int64) * GROUPS
    acc = tl.zeros([COLUMNS, ROWS], tl.float32)
    acc_up = tl.zeros([COLUMNS, ROWS], tl.float32)
    IN_ROW: tl.constexpr = GROUPS == 1 and minimum is None  # one scale for a row: applied at the end
    # A group's scales are loaded a block ahead: nothing waits for them.
    of_up_groups = of_groups + up_rows * GROUPS
    factor = tl.load(scale + of_groups, mask=is_output, other=0.0)
    factor_up = tl.load(scale + of_up_groups, mask=is_output, other=0.0) if GATED else factor
    for start in range(0, DEPTH, BLOCK_DEPTH):
        group = start // GROUP
        next_group = tl.minimum((start + BLOCK_DEPTH) // GROUP, GROUPS - 1)
        x_low = tl.load(of_x + start, mask=is_row, other=0.0)
        x_high = tl.load(of_x + start + BLOCK_BYTES, mask=is_row, other=0.0) if BITS == 4 else x_low
        place = start * BITS // 8
        q = tl.load(of_weight + place, mask=is_output[:, None], other=0.0)
        if GATED:
            q_up = tl.load(of_weight + up_rows * ROW_BYTES + place, mask=is_output[:, None], other=0.0)
        if IN_ROW:
            acc = _add_products(acc, x_low, x_high, q, None, ZERO, BITS, ASM)
            if GATED:
                acc_up = _add_products(acc_up, x_low, x_high, q_up, None, ZERO, BITS, ASM)
        else:
            next_factor = tl.load(scale + of_groups + next_group, mask=is_output, other=0.0)
            acc = _add_products(acc, x_low, x_high, q, factor, ZERO, BITS, ASM)
            factor = next_factor
            if GATED:
                next_factor = tl.load(scale + of_up_groups + next_group, mask=is_output, other=0.0)
                acc_up = _add_products(acc_up, x_low, x_high, q_up, factor_up, ZERO, BITS, ASM)
                factor_up = next_factor
        if minimum is not None:
            of_inputs = tl.sum(x_low.to(tl.float32), 0)
            if BITS == 4:
                of_inputs += tl.sum(x_high.to(tl.float32), 0)
            least = tl.load(minimum + of_groups + group, mask=is_output, other=0.0).to(tl.float32)
            acc += least[:, None] * of_inputs[None, :]
            if GATED:
                least = tl.load(minimum + of_up_groups + group, mask=is_output, other=0.0).to(tl.float32)
                acc_up += least[:, None] * of_inputs[None, :]
    if IN_ROW:
        acc *= factor.to(tl.float32)[:, None]
        acc_up *= factor_up.to(tl.float32)[:, None]
    return acc, acc_up


@triton.jit(do_not_specialize=["rows"])
def _weight_only_kernel(
    x,
    weight,
    scale,
    minimum,
    bias,
    residual,
    out,
    rows,
    columns,
    x_stride,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    ZERO: tl.constexpr,
    GATED: tl.constexpr,
    ASM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
    ROW_TILES: tl.constexpr,
    PDL: tl.constexpr,
):
    row_tile, column_tile = swizzled_tile(tl.cdiv(rows, BLOCK_ROWS), tl.cdiv(columns, BLOCK_COLUMNS), ROW_TILES)
    row = row_tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = column_tile * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    is_column = column < columns
    is_row = (row < rows)[None, :]
    pdl_wait(PDL)
    acc, acc_up = weight_only_sums(
        x + row.to(tl.int64)[None, :] * x_stride, is_row, weight, scale, minimum, column, is_column, columns,
        DEPTH, GROUP, BITS, ZERO, GATED, ASM, BLOCK_ROWS, BLOCK_COLUMNS, BLOCK_DEPTH,
    )  # fmt: skip
    if bias is not None:
        acc += tl.load(bias + column, mask=is_column, other=0.0).to(tl.float32)[:, None]
    if GATED:
        if bias is not None:
            acc_up += tl.load(bias + columns + column, mask=is_column, other=0.0).to(tl.float32)[:, None]
        acc = acc * tl.sigmoid(acc) * acc_up
    valid = is_column[:, None] & is_row
    places = row.to(tl.int64)[None, :] * columns + column[:, None]
    if residual is not None:
        acc += tl.load(residual + places, mask=valid, other=0.0).to(tl.float32)
    tl.store(out + places, acc.to(out.dtype.element_ty), mask=valid)


@triton.jit
def _dequantize_kernel(
    weight,
    scale,
    minimum,
    out,
    ROW_BYTES: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    ZERO: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    DEPTH: tl.constexpr = ROW_BYTES * 8 // BITS
    GROUPS: tl.constexpr = (DEPTH + GROUP - 1) // GROUP
    row = tl.program_id(0).to(tl.int64)
    byte = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = byte < ROW_BYTES
    HALF: tl.constexpr = BLOCK_DEPTH // 2
    input_ = byte // HALF * BLOCK_DEPTH + byte % HALF if BITS == 4 else byte
    group = row * GROUPS + input_ // GROUP
    pdl_wait(PDL)  # `out` may be memory that is still being read
    q = tl.load(weight + row * ROW_BYTES + byte, mask=inside, other=0.0)
    factor = tl.load(scale + group, mask=inside, other=0.0).to(tl.float32)
    least = tl.load(minimum + group, mask=inside, other=0.0).to(tl.float32) if minimum is not None else 0.0
    places = out + row * DEPTH + input_
    low = (q & 15) if BITS == 4 else q
    tl.store(places, ((low.to(tl.float32) - ZERO) * factor + least).to(out.dtype.element_ty), mask=inside)
    if BITS == 4:
        high = (q >> 4).to(tl.float32)
        tl.store(places + HALF, ((high - ZERO) * factor + least).to(out.dtype.element_ty), mask=inside)
