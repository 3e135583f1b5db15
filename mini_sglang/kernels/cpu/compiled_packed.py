"""The code of products with packed weights, compiled by Numba: activations in 8 bits, integer sums, float32 between.

A row of activations is quantised by blocks of 32 inputs (16 where the weight has groups of 16): x = scale * x8. Of each
block an integer instruction multiplies 4 inputs of 8 or 16 outputs at a time, and its sum, which is exact, is scaled
and added to a float32 per output. Lanes are outputs and blocks are added in order, so a row's result has the same bits
in every batch, on every number of threads and with every instruction. `packed.py` says how weights and rows lie in
memory.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from llvmlite import binding, ir
from numba import carray, cfunc, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from mini_sglang.kernels.cpu.compiled import OPTIONS, exp, narrow, next_work_item, pointer, widen
from mini_sglang.kernels.cpu.vectors import (
    FLOAT,
    INT8,
    INT16,
    INT32,
    call,
    constant,
    fma,
    load,
    splat,
    store,
    total,
)

TILE = 16  # outputs that lie together
ROW_BLOCK_EXTRA = 8  # bytes of a block of a row beside its inputs: float32 scale, int32 sum
_LANES = 8  # of the sum of a norm
ROWS_PER_ITEM = 64  # that a thread multiplies with one tile

# Without `fastmath` the source alone says what a result is, whatever the compiler makes of it where.
_compile = cfunc("void(voidptr)", **{**OPTIONS, "fastmath": False})


class PackedForm(NamedTuple):
    """How weights lie in memory, and the instruction set that multiplies them."""

    bits: int  # of a weight: 4 (0 to 15) or 8 (int8)
    block: int  # inputs
    scale_bits: int  # of a scale or minimum, a float: 16 or 32
    has_minimum: int  # 0 or 1
    instruction: str

    @property
    def weight_bytes(self) -> int:
        """Of a tile's block, without scales."""
        return TILE * self.block * self.bits // 8

    @property
    def scale_bytes(self) -> int:
        """Of the scales of a tile's block."""
        return TILE * self.scale_bits // 8

    @property
    def tile_bytes(self) -> int:
        """Of a tile's block."""
        return self.weight_bytes + self.scale_bytes * (1 + self.has_minimum)

    @property
    def lanes(self) -> int:
        """Outputs per vector."""
        return 16 if self.instruction == "avx512vnni" else 8

    @property
    def rows(self) -> int:
        """That are multiplied in one pass: as many as registers hold sums of."""
        return 8 if self.instruction == "avx512vnni" else 4

    @staticmethod
    def of(literal: types.StringLiteral) -> PackedForm:
        """The form that an intrinsic gets as the text of its fields."""
        *numbers, instruction = literal.literal_value.split()
        bits, block, scale_bits, has_minimum = map(int, numbers)
        return PackedForm(bits, block, scale_bits, has_minimum, instruction)


class CompiledPacked(NamedTuple):
    """The kernels, objects of `numba.cfunc` of type void(voidptr)."""

    quantise: Any
    multiply: Any


@cache
def best_instruction() -> str:
    """The fastest of `INSTRUCTIONS` that this processor has."""
    features = binding.get_host_cpu_features()
    if features.get("avx512vnni") and features.get("avx512vl"):
        return "avx512vnni"
    if features.get("avxvnni"):
        return "avxvnni"
    return "avx2" if features.get("avx2") else "portable"


@cache
def compiled_packed(element: Any, form: PackedForm) -> CompiledPacked:
    """The kernels over tensors of one element type: float32, or uint16 for the bits of bfloat16."""
    block, tile_block_bytes, passed = form.block, form.tile_bytes, form.rows
    text = " ".join(map(str, form))

    @_compile
    def quantise(data):
        _, x_at, norm_at, into, rows, size, group, row_bytes = carray(data, (8,), np.int64)
        eps = carray(data, (9,), np.float64)[8]
        x = carray(pointer(x_at), (rows, size), element)
        norm = carray(pointer(norm_at), (size if norm_at else 0,), element)
        values = np.empty(size + block, np.float32)
        row = next_work_item(data)
        while row < rows:
            _quantise_row(x, row, group, block, norm, eps, values, into + row * row_bytes)
            row = next_work_item(data)

    @_compile
    def multiply(data):
        numbers = carray(data, (15,), np.int64)
        _, x8_at, weights_at, bias_at, addend_at, out_at = numbers[:6]
        rows, outputs, blocks, gated, x_at, norm_at, size, group, tiles_per_item = numbers[6:]
        eps = carray(data, (16,), np.float64)[15]
        row_bytes, tile_bytes = blocks * (block + ROW_BLOCK_EXTRA), blocks * tile_block_bytes
        x8 = carray(pointer(x8_at), (rows * row_bytes,), np.uint8)
        if x_at:  # few rows: every thread quantises them for itself
            x8 = np.empty(rows * row_bytes, np.uint8)
            x = carray(pointer(x_at), (rows, size), element)
            norm = carray(pointer(norm_at), (size if norm_at else 0,), element)
            values = np.empty(size + block, np.float32)
            for row in range(rows):
                _quantise_row(x, row, group, block, norm, eps, values, x8[row * row_bytes :].ctypes.data)
        bias = carray(pointer(bias_at), (outputs if bias_at else 0,), element)
        width = outputs // 2 if gated else outputs
        addend = carray(pointer(addend_at), (rows if addend_at else 0, width), element)
        out = carray(pointer(out_at), (rows, width), element)
        tiles = (width + TILE - 1) // TILE
        sums = np.empty((2, passed, TILE), np.float32)
        columns = (tiles + tiles_per_item - 1) // tiles_per_item
        item = next_work_item(data)
        while item < columns * ((rows + ROWS_PER_ITEM - 1) // ROWS_PER_ITEM):
            first_tile, first_row = item % columns * tiles_per_item, item // columns * ROWS_PER_ITEM
            for tile in range(first_tile, min(first_tile + tiles_per_item, tiles)):
                begin, end, first = first_row, min(first_row + ROWS_PER_ITEM, rows), tile * TILE
                count = min(TILE, width - first)
                while begin < end:
                    step = min(passed, end - begin) if end - begin > passed // 2 else 1
                    inputs = x8[begin * row_bytes :].ctypes.data
                    for half in range(2 if gated else 1):
                        weights, into = weights_at + (half * tiles + tile) * tile_bytes, sums[half].ctypes.data
                        if step == 1:
                            _product(inputs, 1, row_bytes, weights, blocks, into, 1, text)
                        else:
                            _product(inputs, step, row_bytes, weights, blocks, into, passed, text)
                    for row in range(step):
                        if bias_at:
                            for half in range(2 if gated else 1):
                                for i in range(count):
                                    sums[half, row, i] += widen(bias[half * width + first + i])
                        if gated:
                            for i in range(count):
                                gate = sums[0, row, i]
                                sums[0, row, i] = gate / (np.float32(1) + exp(-gate)) * sums[1, row, i]
                        if addend_at:
                            for i in range(count):
                                sums[0, row, i] += widen(addend[begin + row, first + i])
                        for i in range(count):
                            out[begin + row, first + i] = narrow(sums[0, row, i], out[begin + row, first + i])
                    begin += step
            item = next_work_item(data)

    return CompiledPacked(quantise, multiply)


@njit(inline="always")
def _quantise_row(x, row, group, block, norm, eps, values, into):
    """One row, normalised first if there is a norm, to the bytes from `into` on. `values` has room for it."""
    size = x.shape[1]
    for i in range(size):
        values[i] = widen(x[row, i])
    if norm.size:
        for i in range(size, size + _LANES):
            values[i] = 0
        factor = np.float32(1 / math.sqrt(_sum_of_squares(values.ctypes.data, size) / size + eps))
        for i in range(size):
            values[i] = values[i] * factor * widen(norm[i])
    padded = values[size:]
    for start in range(0, size, group):
        for first in range(start, start + group, block):
            count = max(0, min(block, min(start + group, size) - first))
            at = values.ctypes.data + 4 * first
            if count < block:
                for i in range(block):
                    padded[i] = values[first + i] if i < count else np.float32(0)
                at = padded.ctypes.data
            _quantise_block(at, into, block)
            into += block + ROW_BLOCK_EXTRA


@intrinsic
def _sum_of_squares(typing_context: Any, values: Any, count: Any) -> Any:
    """The sum over `count` float32s at an address, rounded up to whole vectors, in an order that is always the same."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        values, count = arguments
        floats = ir.VectorType(FLOAT, _LANES)
        sums = cgutils.alloca_once_value(builder, floats(None))
        builder.store(floats(None), sums)
        vectors = builder.udiv(builder.add(count, count.type(_LANES - 1)), count.type(_LANES))
        with cgutils.for_range(builder, vectors) as loop:
            value = load(builder, floats, builder.add(values, builder.mul(loop.index, count.type(4 * _LANES))), 0)
            builder.store(builder.fadd(builder.load(sums), builder.fmul(value, value)), sums)
        lanes = builder.load(sums)
        return total(builder, lanes)

    return types.float32(types.int64, types.int64), generate


@intrinsic(prefer_literal=True)
def _quantise_block(typing_context: Any, values: Any, into: Any, block: Any) -> Any:
    """`block` float32s at an address -> at `into` as many int8s, their scale float32 and their sum int32."""
    if not isinstance(block, types.IntegerLiteral):
        return None
    size = block.literal_value

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        values, into, _ = arguments
        floats, words, bytes_ = (ir.VectorType(kind, size) for kind in (FLOAT, INT32, INT8))
        x = load(builder, floats, values, 0)
        # as integers, without the sign, so that NaN is the largest
        magnitudes = builder.and_(builder.bitcast(x, words), constant(words, 0x7FFFFFFF))
        most = builder.bitcast(call(builder, f"llvm.vector.reduce.smax.v{size}i32", INT32, [magnitudes]), FLOAT)
        some = builder.fcmp_unordered("!=", most, FLOAT(0.0))
        inverse = builder.select(some, builder.fdiv(FLOAT(127.0), most), FLOAT(0.0))
        scaled = builder.fmul(x, splat(builder, inverse, size))
        x8 = builder.fptosi(call(builder, f"llvm.rint.v{size}f32", floats, [scaled]), words)
        scale = builder.fdiv(most, FLOAT(127.0))
        sum8 = call(builder, f"llvm.vector.reduce.add.v{size}i32", INT32, [x8])
        for at, value in ((0, builder.trunc(x8, bytes_)), (size, scale), (size + 4, sum8)):
            store(builder, value, into, at)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, block), generate


# -- the product of a few rows and a tile ------------------------------------------------------------------------------


@intrinsic(prefer_literal=True)
def _product(
    typing_context: Any,
    x8: Any,
    rows: Any,
    row_bytes: Any,
    weights: Any,
    blocks: Any,
    sums: Any,
    most_rows: Any,
    form: Any,
) -> Any:
    """Write the products of `rows` quantised rows with one tile to `sums` [most_rows, TILE] float32.

    The first six are int64s (three of them addresses), the others literals: `form` as `PackedForm.of` reads it. With
    fewer rows than `most_rows` the last one is computed more than once.
    """
    most, kind = most_rows.literal_value, PackedForm.of(form)
    lanes = kind.lanes
    parts = range(TILE // lanes)  # vectors of outputs

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        x8, rows, row_bytes, weights, blocks, sums = arguments[:6]
        floats = ir.VectorType(FLOAT, lanes)
        last = builder.sub(rows, rows.type(1))
        of_rows = [x8]
        for row in range(1, most):
            index = builder.select(builder.icmp_signed("<", rows.type(row), rows), rows.type(row), last)
            of_rows.append(builder.add(x8, builder.mul(index, row_bytes)))
        totals = [[cgutils.alloca_once_value(builder, floats(None)) for _ in parts] for _ in range(most)]
        for cell in itertools.chain(*totals):
            builder.store(floats(None), cell)
        with cgutils.for_range(builder, blocks) as loop:
            tile = builder.add(weights, builder.mul(loop.index, rows.type(kind.tile_bytes)))
            inputs = builder.mul(loop.index, rows.type(kind.block + ROW_BLOCK_EXTRA))
            x_blocks = [builder.add(row, inputs) for row in of_rows]
            integers = _integer_sums(builder, kind, x_blocks, tile)
            for row, at in enumerate(x_blocks):
                x_scale = load(builder, FLOAT, at, kind.block)
                x_sum = builder.fmul(builder.sitofp(load(builder, INT32, at, kind.block + 4), FLOAT), x_scale)
                for part in parts:
                    value = builder.load(totals[row][part])
                    after = kind.weight_bytes + kind.scale_bits // 8 * lanes * part
                    scale = builder.fmul(_load_floats(builder, kind, tile, after), splat(builder, x_scale, lanes))
                    value = fma(builder, builder.sitofp(integers[row][part], floats), scale, value)
                    if kind.has_minimum:
                        minimum = _load_floats(builder, kind, tile, after + kind.scale_bytes)
                        value = fma(builder, minimum, splat(builder, x_sum, lanes), value)
                    builder.store(value, totals[row][part])
        for row in range(most):
            for part in parts:
                store(builder, builder.load(totals[row][part]), sums, 4 * (TILE * row + lanes * part))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 6, most_rows, form), generate


def _load_floats(builder: ir.IRBuilder, form: PackedForm, tile: ir.Value, offset: int) -> ir.Value:
    """The scales or minimums of a vector of outputs, in float32."""
    lanes = form.lanes
    floats = ir.VectorType(FLOAT, lanes)
    if form.scale_bits == 32:
        return load(builder, floats, tile, offset)
    return builder.fpext(load(builder, ir.VectorType(ir.HalfType(), lanes), tile, offset), floats)


def _integer_sums(
    builder: ir.IRBuilder, form: PackedForm, x_blocks: Sequence[ir.Value], tile: ir.Value
) -> list[list[ir.Value]]:
    """One block of every row times one block of a tile -> int32 vectors by row and part"""
    lanes = form.lanes
    parts = range(TILE // lanes)
    quad, bytes_ = 4 * TILE, ir.VectorType(INT8, 4 * lanes)  # 4 inputs of every output
    sums = [[_first_sum(builder, form, x_block)] * len(parts) for x_block in x_blocks]
    stored: list[ir.Value] = []
    for step in range(form.block // 4):
        if form.bits == 8:
            weights = [load(builder, bytes_, tile, quad * step + 4 * lanes * part) for part in parts]
        elif step % 2 == 0:  # the low halves of bytes are the weights of this step, the high halves those of the next
            stored = [load(builder, bytes_, tile, quad * (step // 2) + 4 * lanes * part) for part in parts]
            weights = [builder.and_(value, constant(bytes_, 15)) for value in stored]
        else:
            weights = [builder.lshr(value, constant(bytes_, 4)) for value in stored]
        for row, x_block in enumerate(x_blocks):
            inputs = splat(builder, load(builder, INT32, x_block, 4 * step), lanes)
            inputs = builder.bitcast(inputs, bytes_)
            for part in parts:
                sums[row][part] = _add_products(builder, form, sums[row][part], weights[part], inputs)
    return [[_last_sum(builder, form, value) for value in of_row] for of_row in sums]


# What an instruction set computes of one step, 4 inputs to each of its lanes. Weights are 0 to 15 or int8, inputs int8.


def _first_sum(builder: ir.IRBuilder, form: PackedForm, x_block: ir.Value) -> ir.Value:
    lanes = form.lanes
    if form.instruction == "avx2" and form.bits == 4:
        return ir.VectorType(INT16, 2 * lanes)(None)
    if form.instruction.endswith("vnni") and form.bits == 8:  # its weights have 128 too much
        x_sum = load(builder, INT32, x_block, form.block + 4)
        return splat(builder, builder.mul(x_sum, INT32(-128)), lanes)
    return ir.VectorType(INT32, lanes)(None)


def _add_products(
    builder: ir.IRBuilder, form: PackedForm, sums: ir.Value, weights: ir.Value, inputs: ir.Value
) -> ir.Value:
    lanes = form.lanes
    bytes_, words = weights.type, ir.VectorType(INT32, lanes)
    if form.instruction.endswith("vnni"):  # unsigned times signed bytes, added in fours to int32
        if form.bits == 8:
            weights = builder.xor(weights, constant(bytes_, 128))
        operands = [sums, builder.bitcast(weights, words), builder.bitcast(inputs, words)]
        return call(builder, f"llvm.x86.avx512.vpdpbusd.{32 * lanes}", words, operands)
    if form.instruction == "avx2":  # unsigned times signed bytes, added in twos to int16, saturating
        shorts = ir.VectorType(INT16, 2 * lanes)
        if form.bits == 4:  # at most 8 steps of 2 * 15 * 127: fits
            return builder.add(sums, call(builder, "llvm.x86.avx2.pmadd.ub.sw", shorts, [weights, inputs]))
        inputs = call(builder, "llvm.x86.avx2.psign.b", bytes_, [inputs, weights])
        negative = builder.icmp_signed("<", weights, bytes_(None))
        weights = builder.select(negative, builder.sub(bytes_(None), weights), weights)  # 128 at most: fits
        pairs = call(builder, "llvm.x86.avx2.pmadd.ub.sw", shorts, [weights, inputs])
        return builder.add(sums, call(builder, "llvm.x86.avx2.pmadd.wd", words, [pairs, constant(shorts, 1)]))
    wide = ir.VectorType(INT32, 4 * lanes)
    products = builder.mul(
        builder.zext(weights, wide) if form.bits == 4 else builder.sext(weights, wide), builder.sext(inputs, wide)
    )
    for first in range(4):
        every_fourth = ir.Constant(words, list(range(first, 4 * lanes, 4)))
        sums = builder.add(sums, builder.shuffle_vector(products, wide(ir.Undefined), every_fourth))
    return sums


def _last_sum(builder: ir.IRBuilder, form: PackedForm, sums: ir.Value) -> ir.Value:
    if sums.type.element == INT32:
        return sums
    words = ir.VectorType(INT32, form.lanes)
    return call(builder, "llvm.x86.avx2.pmadd.wd", words, [sums, constant(sums.type, 1)])
