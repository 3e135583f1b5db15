"""Vector code for kernels, as LLVM instructions: what Numba's compiler would not make of loops, or not always alike.

The functions build instructions within an intrinsic; an address is an int64. Knows no kernel. Numba caches a kernel by
the file that it stands in, so clear `__pycache__` after a change here.
"""

from __future__ import annotations

from collections.abc import Sequence

from llvmlite import ir
from numba.core import cgutils

INT8, INT16, INT32, FLOAT = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.FloatType()


def call(builder: ir.IRBuilder, name: str, result: ir.Type, operands: Sequence[ir.Value]) -> ir.Value:
    """Call an instruction of LLVM or of a processor."""
    kind = ir.FunctionType(result, [operand.type for operand in operands])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), operands)


def fma(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    """a * b + c of vectors of float32, rounded once"""
    return call(builder, f"llvm.fma.v{a.type.count}f32", a.type, [a, b, c])


def constant(kind: ir.VectorType, value: int) -> ir.Value:
    return ir.Constant(kind, [value] * kind.count)


def splat(builder: ir.IRBuilder, value: ir.Value, lanes: int) -> ir.Value:
    """A vector of equal values."""
    kind = ir.VectorType(value.type, lanes)
    first = builder.insert_element(kind(ir.Undefined), value, INT32(0))
    return builder.shuffle_vector(first, kind(ir.Undefined), ir.VectorType(INT32, lanes)(None))


def total(builder: ir.IRBuilder, vector: ir.Value) -> ir.Value:
    """The sum of 8 or 16 float32s, in the order of `totals`."""
    return builder.extract_element(totals(builder, [vector] * 4), INT32(0))


def totals(builder: ir.IRBuilder, vectors: Sequence[ir.Value]) -> ir.Value:
    """The sums of four vectors of 8 or 16 float32s: of each its halves are added, then halves of that, to the end."""

    def added(a: ir.Value, b: ir.Value, lower: Sequence[int], upper: Sequence[int]) -> ir.Value:
        places = (ir.Constant(ir.VectorType(INT32, len(half)), list(half)) for half in (lower, upper))
        return builder.fadd(*(builder.shuffle_vector(a, b, place) for place in places))

    def four(vector: ir.Value) -> ir.Value:
        count = vector.type.count
        return vector if count == 4 else four(added(vector, vector, range(count // 2), range(count // 2, count)))

    a, b, c, d = map(four, vectors)
    ab, cd = (added(*pair, (0, 1, 4, 5), (2, 3, 6, 7)) for pair in ((a, b), (c, d)))
    return added(ab, cd, (0, 2, 4, 6), (1, 3, 5, 7))


def size_of(element: ir.Type) -> int:
    """The bytes of a float32, or of the 16 bits of a bfloat16"""
    return 4 if element == FLOAT else 2


def address(builder: ir.IRBuilder, kind: ir.Type, base: ir.Value, offset: int) -> ir.Value:
    return builder.inttoptr(builder.add(base, base.type(offset)), kind.as_pointer())


def load(builder: ir.IRBuilder, kind: ir.Type, base: ir.Value, offset: int = 0) -> ir.Value:
    return builder.load(address(builder, kind, base, offset), align=1 if kind == INT8 else 2)


def store(builder: ir.IRBuilder, value: ir.Value, base: ir.Value, offset: int = 0) -> None:
    builder.store(value, address(builder, value.type, base, offset), align=2)


def load_floats(builder: ir.IRBuilder, element: ir.Type, base: ir.Value, lanes: int) -> ir.Value:
    """float32s, or what the 16 bits of bfloat16s stand for"""
    stored = load(builder, ir.VectorType(element, lanes), base)
    if element == FLOAT:
        return stored
    words = ir.VectorType(INT32, lanes)
    return builder.bitcast(builder.shl(builder.zext(stored, words), constant(words, 16)), ir.VectorType(FLOAT, lanes))
