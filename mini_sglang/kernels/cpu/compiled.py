"""The code of the CPU's fused kernels, compiled by Numba: norm, rotation, gate, and decode attention over pages.

A kernel takes one address of int64s: a counter for `next_work_item`, and then the kernel's arguments. Tensors are
passed as addresses, since wrapping each as an array would cost more than the kernel. A bfloat16 is passed as its 16
bits; all arithmetic is float32. `TorchKernels` and the reference attention define what the kernels compute.
"""

from __future__ import annotations

import math
import struct
from functools import cache, reduce
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import carray, cfunc, njit, types
from numba.core import cgutils
from numba.core.cgutils import for_range_slice
from numba.extending import intrinsic

from mini_sglang.kernels.cpu.vectors import FLOAT, fma, load, load_floats, size_of, splat, store, totals

_ROWS_PER_ITEM = 8  # that a thread takes at a time
_LANES = 16  # of vectors in attention

OPTIONS: dict[str, Any] = {
    "fastmath": {"reassoc", "contract", "nsz", "arcp"}, "error_model": "numpy", "nogil": True, "cache": True
}  # fmt: skip
_compile = cfunc("void(voidptr)", **OPTIONS)


class Compiled(NamedTuple):
    """The kernels, objects of `numba.cfunc` of type void(voidptr)."""

    rms_norm: Any
    rope_store: Any
    silu_mul: Any
    attend: Any


@cache  # compiled code is the same for every engine of a process
def compiled_for(element: Any) -> Compiled:
    """The kernels over tensors of one element type: float32, or uint16 for the bits of bfloat16."""

    @_compile
    def rms_norm(data):
        _, x_at, weight_at, out_at, rows, size = carray(data, (6,), np.int64)
        eps = carray(data, (7,), np.float64)[6]
        x, out = carray(pointer(x_at), (rows, size), element), carray(pointer(out_at), (rows, size), element)
        weight = carray(pointer(weight_at), (size,), element)
        first = next_work_item(data) * _ROWS_PER_ITEM
        while first < rows:
            for row in range(first, min(first + _ROWS_PER_ITEM, rows)):
                total = np.float32(0)
                for i in range(size):
                    value = widen(x[row, i])
                    total += value * value
                scale = np.float32(1 / math.sqrt(total / size + eps))
                for i in range(size):
                    out[row, i] = narrow(widen(x[row, i]) * scale * widen(weight[i]), weight[i])
            first = next_work_item(data) * _ROWS_PER_ITEM

    @_compile
    def rope_store(data):
        numbers = carray(data, (17,), np.int64)
        _, qkv_at, cos_at, sin_at, positions_at, keys_at, values_at, cells_at, q_norm_at, k_norm_at, q_at = numbers[:11]
        tokens, num_heads, kv_heads, size, context, num_cells = numbers[11:]
        eps = carray(data, (18,), np.float64)[17]
        half = size // 2
        qkv = carray(pointer(qkv_at), (tokens, num_heads + 2 * kv_heads, size), element)
        cos = carray(pointer(cos_at), (context, half), element)
        sin = carray(pointer(sin_at), (context, half), element)
        positions = carray(pointer(positions_at), (tokens,), np.int64)
        cells = carray(pointer(cells_at), (tokens,), np.int64)
        keys = carray(pointer(keys_at), (num_cells, kv_heads, size), element)
        values = carray(pointer(values_at), (num_cells, kv_heads, size), element)
        q_norm, k_norm = carray(pointer(q_norm_at), (size,), element), carray(pointer(k_norm_at), (size,), element)
        q = carray(pointer(q_at), (tokens, num_heads, size), element)
        norm = q_norm_at != 0 and k_norm_at != 0
        values_of_head = np.empty(size, np.float32)
        first = next_work_item(data) * _ROWS_PER_ITEM
        while first < tokens:
            for token in range(first, min(first + _ROWS_PER_ITEM, tokens)):
                position, target = positions[token], cells[token]
                for head in range(num_heads + kv_heads):
                    is_query = head < num_heads
                    for i in range(size):
                        values_of_head[i] = widen(qkv[token, head, i])
                    if norm:
                        total = np.float32(0)
                        for i in range(size):
                            total += values_of_head[i] * values_of_head[i]
                        scale = np.float32(1 / math.sqrt(total / size + eps))
                        for i in range(size):
                            weight = widen(q_norm[i]) if is_query else widen(k_norm[i])
                            values_of_head[i] *= scale * weight
                    for i in range(half):
                        a, b = values_of_head[i], values_of_head[half + i]
                        c, s = widen(cos[position, i]), widen(sin[position, i])
                        values_of_head[i] = a * c - b * s
                        values_of_head[half + i] = b * c + a * s
                    if is_query:
                        for i in range(size):
                            q[token, head, i] = narrow(values_of_head[i], cos[0, 0])
                    else:
                        for i in range(size):
                            keys[target, head - num_heads, i] = narrow(values_of_head[i], cos[0, 0])
                for head in range(kv_heads):
                    for i in range(size):
                        values[target, head, i] = qkv[token, num_heads + kv_heads + head, i]
            first = next_work_item(data) * _ROWS_PER_ITEM

    @_compile
    def silu_mul(data):
        _, gate_up_at, out_at, tokens, size = carray(data, (5,), np.int64)
        gate_up = carray(pointer(gate_up_at), (tokens, 2, size), element)
        out = carray(pointer(out_at), (tokens, size), element)
        first = next_work_item(data) * _ROWS_PER_ITEM
        while first < tokens:
            for token in range(first, min(first + _ROWS_PER_ITEM, tokens)):
                for i in range(size):
                    gate, up = widen(gate_up[token, 0, i]), widen(gate_up[token, 1, i])
                    out[token, i] = narrow(gate / (np.float32(1) + exp(-gate)) * up, gate_up[token, 0, i])
            first = next_work_item(data) * _ROWS_PER_ITEM

    @_compile
    def attend(data):
        numbers = carray(data, (17,), np.int64)
        _, q_at, keys_at, values_at, page_table_at, blocks_at, out_at = numbers[:7]
        num_blocks, most_queries, num_heads, kv_heads, size, num_cells, page_size, table_width, window = numbers[7:16]
        sinks_at = numbers[16]
        sinks = carray(pointer(sinks_at), (num_heads,), np.float32)
        group = num_heads // kv_heads
        keys = carray(pointer(keys_at), (num_cells, kv_heads, size), element)
        values = carray(pointer(values_at), (num_cells, kv_heads, size), element)
        blocks = carray(pointer(blocks_at), (num_blocks, 4), np.int64)
        scores = np.empty((most_queries * group, table_width * page_size + 3), np.float32)
        query, acc = np.empty((2, most_queries * group, size), np.float32)
        scale, like = np.float32(1 / math.sqrt(size)), element(0)
        stride = kv_heads * size * keys.itemsize
        item = next_work_item(data)
        while item < num_blocks * kv_heads:
            kv_head = item % kv_heads
            row, first, count, start = blocks[item // kv_heads]
            q = carray(pointer(q_at), (first + count, kv_heads, group, size), element)
            out = carray(pointer(out_at), (first + count, kv_heads, group, size), element)
            page_table = carray(pointer(page_table_at), (row + 1, table_width), np.int64)[row]
            for index in range(count * group):
                for i in range(size):
                    query[index, i] = widen(q[first + index // group, kv_head, index % group, i]) * scale
                    acc[index, i] = 0
            seen_from = max(0, start + 1 - window) if window else 0
            pages = range(seen_from // page_size, (start + count + page_size - 1) // page_size)
            for page in pages:
                begin, cell = page * page_size, page_table[page] * page_size
                for index in range(count * group):
                    at, until = _seen(begin, page_size, start + index // group, window)
                    key = keys[cell + at - begin :, kv_head].ctypes.data
                    _dots(query[index].ctypes.data, key, size, stride, until - at, scores[index, at:].ctypes.data, like)
            for index in range(count * group):
                end = start + index // group + 1
                sink = sinks[kv_head * group + index % group] if sinks_at else np.float32(-np.inf)
                _softmax(scores[index, max(0, end - window) if window else 0 : end], sink)
            for page in pages:
                begin, cell = page * page_size, page_table[page] * page_size
                for index in range(count * group):
                    at, until = _seen(begin, page_size, start + index // group, window)
                    value = values[cell + at - begin :, kv_head].ctypes.data
                    weights = scores[index, at:].ctypes.data
                    _add_weighted(weights, value, size, stride, until - at, acc[index].ctypes.data, like)
            for index in range(count * group):
                for i in range(size):
                    out[first + index // group, kv_head, index % group, i] = narrow(acc[index, i], keys[0, 0, 0])
            item = next_work_item(data)

    return Compiled(rms_norm, rope_store, silu_mul, attend)


@njit(inline="always")
def _seen(begin, page_size, position, window):
    """From where to where of the page that starts at position `begin` a token at `position` sees."""
    return max(begin, position + 1 - window) if window else begin, min(begin + page_size, position + 1)


@intrinsic
def _dots(typing_context: Any, query: Any, key: Any, size: Any, stride: Any, count: Any, scores: Any, like: Any) -> Any:
    """Write to `scores` the products of a query float32 [size] with `count` keys, and up to 3 more, of `like`'s type.

    All but the last are int64s, three of them addresses; keys begin `stride` bytes after each other.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        query, key, size, stride, count, scores, _ = arguments
        element, number = context.get_value_type(like), size.type
        sums = [cgutils.alloca_once(builder, ir.VectorType(FLOAT, _LANES)) for _ in range(4)]
        rest = [cgutils.alloca_once(builder, ir.VectorType(FLOAT, 1)) for _ in range(4)]
        whole = builder.sub(size, builder.urem(size, number(_LANES)))
        with for_range_slice(builder, number(0), count, number(4)) as (first, _):
            of_keys = []
            for index in range(4):  # the last key again where there are fewer
                ahead = builder.add(first, number(index))
                ahead = builder.select(builder.icmp_signed("<", ahead, count), ahead, builder.sub(count, number(1)))
                of_keys.append(builder.add(key, builder.mul(ahead, stride)))
            for cells, begin, end, lanes in ((sums, number(0), whole, _LANES), (rest, whole, size, 1)):
                for cell in cells:
                    builder.store(cell.type.pointee(None), cell)
                with for_range_slice(builder, begin, end, number(lanes)) as (i, _):
                    a = load_floats(builder, FLOAT, builder.add(query, builder.shl(i, number(2))), lanes)
                    offset = builder.mul(i, number(size_of(element)))
                    for at, cell in zip(of_keys, cells, strict=True):
                        b = load_floats(builder, element, builder.add(at, offset), lanes)
                        builder.store(fma(builder, a, b, builder.load(cell)), cell)
            four = totals(builder, [builder.load(cell) for cell in sums])
            for index, cell in enumerate(rest):
                lane = ir.IntType(32)(index)
                more = builder.extract_element(builder.load(cell), ir.IntType(32)(0))
                four = builder.insert_element(four, builder.fadd(builder.extract_element(four, lane), more), lane)
            store(builder, four, builder.add(scores, builder.shl(first, number(2))))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 6, like), generate


@intrinsic
def _add_weighted(
    typing_context: Any, weights: Any, value: Any, size: Any, stride: Any, count: Any, sums: Any, like: Any
) -> Any:
    """Add to `sums` float32 [size] `count` values of the type of `like`, each times its float32 of `weights`, in order.

    All but the last are int64s, three of them addresses; values begin `stride` bytes after each other.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        weights, value, size, stride, count, sums, _ = arguments
        element = context.get_value_type(like)
        zero, many, whole = size.type(0), *(builder.sub(size, builder.urem(size, size.type(n))) for n in (32, _LANES))
        for start, stop, lanes in ((zero, many, 32), (many, whole, _LANES), (whole, size, 1)):
            floats = ir.VectorType(FLOAT, lanes)
            cell = cgutils.alloca_once(builder, floats)
            with for_range_slice(builder, start, stop, size.type(lanes)) as (i, _):
                into = builder.add(sums, builder.shl(i, i.type(2)))
                at = builder.add(value, builder.mul(i, i.type(size_of(element))))
                builder.store(load(builder, floats, into), cell)
                with cgutils.for_range(builder, count) as values:
                    weight = load(builder, FLOAT, builder.add(weights, builder.shl(values.index, stride.type(2))))
                    row = load_floats(builder, element, builder.add(at, builder.mul(values.index, stride)), lanes)
                    added = fma(builder, splat(builder, weight, lanes), row, builder.load(cell))
                    builder.store(added, cell)
                store(builder, builder.load(cell), into)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 6, like), generate


@njit(inline="always")
def _softmax(scores, sink):
    """With a score of no position besides, -inf for none."""
    best = max(_largest(scores.ctypes.data, scores.size), sink)
    total = exp(sink - best) if sink > -np.inf else np.float32(0)
    for i in range(scores.size):
        scores[i] = exp(scores[i] - best)
        total += scores[i]
    for i in range(scores.size):
        scores[i] /= total


@intrinsic
def _largest(typing_context: Any, values: Any, count: Any) -> Any:
    """The largest of `count` float32s at an address, at least one. Numba's own loop would compare one by one."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        values, count = arguments
        whole = builder.sub(count, builder.urem(count, count.type(8)))
        best = []
        for begin, end, lanes in ((count.type(0), whole, 8), (whole, count, 1)):
            floats = ir.VectorType(FLOAT, lanes)
            cell = cgutils.alloca_once(builder, floats)
            builder.store(splat(builder, load(builder, FLOAT, values), lanes), cell)
            with for_range_slice(builder, begin, end, count.type(lanes)) as (i, _):
                value, most = load(builder, floats, builder.add(values, builder.shl(i, i.type(2)))), builder.load(cell)
                builder.store(builder.select(builder.fcmp_ordered(">", value, most), value, most), cell)
            best += [builder.extract_element(builder.load(cell), ir.IntType(32)(lane)) for lane in range(lanes)]
        return reduce(lambda a, b: builder.select(builder.fcmp_ordered(">", b, a), b, a), best)

    return types.float32(types.int64, types.int64), generate


@cache
def float_bits(number: float) -> int:
    """The bits of a float64, as an int64: how a kernel is passed one."""
    return int(struct.unpack("q", struct.pack("d", number))[0])


@intrinsic
def pointer(typing_context: Any, address: Any) -> Any:
    """An address as the pointer that `carray` takes."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.int64), generate


@intrinsic
def widen(typing_context: Any, value: Any) -> Any:
    """A float32 as it is, or the float32 whose upper half is the 16 bits of a bfloat16."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if value == types.float32:
            return arguments[0]
        bits = builder.shl(builder.zext(arguments[0], ir.IntType(32)), ir.Constant(ir.IntType(32), 16))
        return builder.bitcast(bits, ir.FloatType())

    return types.float32(value), generate


@intrinsic
def narrow(typing_context: Any, value: Any, like: Any) -> Any:
    """A float32 as an element of the type of `like`: itself, or the bits of the nearest bfloat16 (ties to even)."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if like == types.float32:
            return arguments[0]
        int32 = ir.IntType(32)
        bits = builder.bitcast(arguments[0], int32)
        odd = builder.and_(builder.lshr(bits, ir.Constant(int32, 16)), ir.Constant(int32, 1))
        rounded = builder.add(bits, builder.add(odd, ir.Constant(int32, 0x7FFF)))
        return builder.trunc(builder.lshr(rounded, ir.Constant(int32, 16)), ir.IntType(16))

    return like(types.float32, like), generate


@intrinsic
def _power_of_two(typing_context: Any, exponent: Any) -> Any:
    """2 ** exponent for a float32 holding a whole number from -126 to 127."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        int32 = ir.IntType(32)
        biased = builder.add(builder.fptosi(arguments[0], int32), ir.Constant(int32, 127))
        return builder.bitcast(builder.shl(biased, ir.Constant(int32, 23)), ir.FloatType())

    return types.float32(types.float32), generate


@njit(inline="always")
def exp(x):
    """exp(x) in float32 to about 2e-7, free of branches and calls so that loops over it become vector code.

    exp(x) = 2^n exp(r) with |r| <= ln(2) / 2, exp(r) by its Taylor polynomial.
    """
    x = min(max(x, np.float32(-87.0)), np.float32(88.0))
    n = np.float32(np.floor(x * np.float32(1.4426950408889634) + np.float32(0.5)))
    r = (x - n * np.float32(0.693359375)) + n * np.float32(2.12194440e-4)  # ln(2) in two parts
    p = np.float32(1 / 5040)
    p = p * r + np.float32(1 / 720)
    p = p * r + np.float32(1 / 120)
    p = p * r + np.float32(1 / 24)
    p = p * r + np.float32(1 / 6)
    p = p * r + np.float32(0.5)
    p = p * r + np.float32(1)
    p = p * r + np.float32(1)
    return p * _power_of_two(n)


@intrinsic
def next_work_item(typing_context: Any, address: Any) -> Any:
    """The next number, from 0 on, that no thread has taken yet; `address` is a void pointer to an int64 counter."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        int64 = ir.IntType(64)
        counter = builder.bitcast(arguments[0], int64.as_pointer())
        return builder.atomic_rmw("add", counter, ir.Constant(int64, 1), "monotonic")

    return types.int64(types.voidptr), generate
