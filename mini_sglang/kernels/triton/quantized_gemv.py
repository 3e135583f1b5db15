"""Matrix products of one row with a weight in 4 or 8 bits, limited by how fast the weight can be read.

The same as `gemv.py`, with the norm before and the gate or residual after in one launch, over a weight that is kept as
it is stored: activations stay as they are, sums are float32. A thread reads 16 bytes of a row at a time, a chunk, whose
weights share a scale: so it multiplies by the scale once for each chunk. The kernel stands beside its PyTorch twin.
"""

# Pointers and scalars of a Triton kernel have no Python types:
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from mini_sglang.kernels.interface import FP8, Norm
from mini_sglang.kernels.triton.gemv import gemv_reference
from mini_sglang.kernels.triton.pdl import pdl_launch, pdl_wait
from mini_sglang.kernels.triton.quantize_rows import GROUP
from mini_sglang.weights.quantized_weight import QuantizedWeight

_CHUNK_BYTES = 16
_BLOCKS = (128, 64, 32, 16)  # inputs; 16 only of 8 bits


@dataclass(frozen=True)
class PackedWeight:
    """W [N, K] in bytes as the kernels read them: w = scale * (q - zero) + minimum, by groups of a row's inputs.

    Of 4 bits, byte j of a block of inputs holds weight j of the block's first half in its low bits, and weight j of the
    second half in its high bits: so a block of activations is read in two whole pieces.
    """

    q: torch.Tensor  # [N, K] float8_e4m3fn or int8, or [N, K / 2] uint8
    scale: torch.Tensor  # [N, groups] float32, or a dtype of two bytes that holds the same values
    minimum: torch.Tensor | None  # likewise
    zero: int
    group_size: int

    @property
    def bits(self) -> int:
        return 4 if self.q.dtype == torch.uint8 else 8

    @property
    def block(self) -> int:
        """The inputs of one group, or a part of them, that are multiplied at a time."""
        return _block(self.shape[1], self.group_size)

    @property
    def is_float8(self) -> bool:
        """Whether products in float8 can take it: by its scales, for rows or for 128 inputs each."""
        return self.q.dtype == FP8 and (self.group_size in (GROUP, self.q.shape[1])) and self.q.shape[1] % 16 == 0

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)"""
        return self.q.shape[0], self.q.shape[1] * 8 // self.bits

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        """-> W [N, K]"""
        q = self.q
        if self.bits == 4:
            halves = q.view(len(q), -1, self.block // 2)
            q = torch.stack((halves & 15, halves >> 4), 2).view(len(q), -1)
        return QuantizedWeight(q, *self._grouped(), self.group_size).dense().to(dtype)

    def _grouped(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        scale = self.scale.float()
        minimum = None if self.minimum is None else self.minimum.float()
        return scale, minimum if not self.zero else -self.zero * scale


def pack(weight: QuantizedWeight) -> PackedWeight | None:
    """Lay out a weight for the kernels; None if its groups are no whole chunks."""
    bits = 4 if weight.q.dtype == torch.uint8 else 8
    columns = weight.q.shape[1]
    chunk = _CHUNK_BYTES * 8 // bits
    if columns % chunk or (weight.group_size % chunk and weight.group_size < columns):
        return None
    minimum, zero = weight.minimum, 0
    if minimum is not None and bits == 4 and torch.equal(minimum, -8 * weight.scale):
        minimum, zero = None, 8
    group = min(weight.group_size, columns)
    q = weight.q.contiguous()
    if bits == 4:
        halves = q.view(len(q), -1, 2, _block(columns, group) // 2)
        q = (halves[:, :, 0] | halves[:, :, 1] << 4).view(len(q), -1)
    return PackedWeight(
        q, _in_few_bytes(weight.scale), None if minimum is None else _in_few_bytes(minimum), zero, group
    )


def _block(columns: int, group_size: int) -> int:
    return next(size for size in _BLOCKS if columns % size == 0 and group_size % size == 0)


def _in_few_bytes(values: torch.Tensor) -> torch.Tensor:
    """The same values in a dtype of two bytes, if there is one that holds them."""
    for dtype in (torch.bfloat16, torch.float16):
        if torch.equal(values.to(dtype).float(), values):
            return values.to(dtype)
    return values


@dataclass(frozen=True)
class QuantizedGemvTuning:
    """How the matrix is cut into tiles, and how many warps a program has."""

    block_n: int  # outputs of a tile
    chunks: int  # of each output
    num_warps: int = 1


def quantized_gemv_tuning(n: int, k: int, bits: int, *, gated: bool) -> QuantizedGemvTuning:
    """The fastest tuning, measured on an H200."""
    whole = triton.next_power_of_2(k * bits // (8 * _CHUNK_BYTES))
    if bits == 4:
        tuning = QuantizedGemvTuning(4, 32, num_warps=4) if gated else QuantizedGemvTuning(2, 128, num_warps=2)
    elif k <= 1024:
        tuning = QuantizedGemvTuning(2, 32) if gated else QuantizedGemvTuning(2, 64)
    else:
        is_small = n <= 4096 and not gated
        tuning = QuantizedGemvTuning(2, 128, num_warps=4) if is_small else QuantizedGemvTuning(2, 64, num_warps=2)
    return replace(tuning, chunks=min(tuning.chunks, whole))


def quantized_gemv(
    x: torch.Tensor,
    weight: PackedWeight,
    *,
    bias: torch.Tensor | None = None,
    norm: Norm | None = None,
    gated: bool = False,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    tuning: QuantizedGemvTuning | None = None,
) -> torch.Tensor:
    """`gemv` with a packed weight: x [1, K], contiguous -> [1, N], or [1, N / 2] gated

    Raises ValueError for more rows or other layouts.
    """
    k = x.shape[1]
    n = weight.shape[0] // 2 if gated else weight.shape[0]
    if len(x) != 1 or x.stride(1) != 1:
        raise ValueError(f"quantized_gemv takes one contiguous row, got {len(x)}, strides {x.stride()}")
    if residual is not None:
        out = residual
    if out is None:
        out = torch.empty(1, n, dtype=x.dtype, device=x.device)
    elif not out.is_contiguous():
        raise ValueError("the residual and `out` must be contiguous")
    tuning = tuning or quantized_gemv_tuning(n, k, weight.bits, gated=gated)
    _quantized_gemv_kernel[(triton.cdiv(n, tuning.block_n),)](
        x,
        weight.q.view(torch.int32),
        weight.scale,
        weight.minimum,
        bias,
        None if norm is None else norm.weight,
        out,
        0.0 if norm is None else norm.eps,
        N=n,
        K=k,
        GROUP=weight.group_size,
        BLOCK=weight.block,
        BITS=weight.bits,
        FLOAT=weight.q.dtype == FP8,
        ZERO=weight.zero,
        ASM=x.is_cuda,
        BLOCK_N=tuning.block_n,
        CHUNKS=tuning.chunks,
        GATED=gated,
        RESIDUAL=residual is not None,
        num_warps=tuning.num_warps,
        **pdl_launch(x.device),
    )
    return out


def quantized_gemv_reference(
    x: torch.Tensor,
    weight: PackedWeight,
    *,
    bias: torch.Tensor | None = None,
    norm: Norm | None = None,
    gated: bool = False,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """The twin of `quantized_gemv`, in float64; it leaves `residual` as it is."""
    dense = weight.dense(torch.float32)
    return gemv_reference(x, dense, bias=bias, norm=norm, gated=gated, residual=residual)


_FLOAT8_PTX = tl.constexpr(
    """
    {
        .reg .b16 low, high, a, b, c, d;
        .reg .b32 ab, cd;
        mov.b32 {low, high}, $4;
        cvt.rn.f16x2.e4m3x2 ab, low;
        cvt.rn.f16x2.e4m3x2 cd, high;
        mov.b32 {a, b}, ab;
        mov.b32 {c, d}, cd;
        cvt.f32.f16 $0, a;
        cvt.f32.f16 $1, b;
        cvt.f32.f16 $2, c;
        cvt.f32.f16 $3, d;
    }
    """
)
_NIBBLES_PTX = tl.constexpr(
    """
    {
        .reg .b16 a, b, c, d;
        .reg .b32 ac, bd;
        and.b32 ac, $4, 0x000f000f;
        or.b32 ac, ac, 0x64006400;
        shr.u32 bd, $4, 8;
        and.b32 bd, bd, 0x000f000f;
        or.b32 bd, bd, 0x64006400;
        mov.b32 {a, c}, ac;
        mov.b32 {b, d}, bd;
        cvt.f32.f16 $0, a;
        cvt.f32.f16 $1, b;
        cvt.f32.f16 $2, c;
        cvt.f32.f16 $3, d;
    }
    """
)


@triton.jit
def _quarters(x):
    """x [CHUNKS, 16] -> elements 0, 4, 8, …, then 1, 5, 9, …, and so on: four of [CHUNKS, 4]"""
    even, odd = tl.split(tl.reshape(x, [x.shape[0], 4, 2, 2]))  # by the lowest bit of the place
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def _four_floats(words, PTX: tl.constexpr):
    """Four float32 of each int32, by instructions that read $4 and write $0 to $3."""
    return tl.inline_asm_elementwise(
        PTX,
        "=f,=f,=f,=f,r",
        [words],
        dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
        is_pure=True,
        pack=1,
    )


@triton.jit
def _four_float8(words, ASM: tl.constexpr):
    """The four float8_e4m3fn of each int32, lowest byte first, as float32."""
    if ASM:
        return _four_floats(words, _FLOAT8_PTX)
    return _float8(words), _float8(words >> 8), _float8(words >> 16), _float8(words >> 24)


@triton.jit
def _float8(words):
    return (words & 255).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32)


@triton.jit
def _four_nibbles(words, ASM: tl.constexpr):
    """1024 plus the low half of each byte of int32 words, lowest byte first, as float32.

    A float16 with the exponent of 1024 has room for an integer below 16: so no integer is converted.
    """
    if ASM:
        return _four_floats(words, _NIBBLES_PTX)
    return _nibble(words), _nibble(words >> 8), _nibble(words >> 16), _nibble(words >> 24)


@triton.jit
def _nibble(words):
    return (words & 15).to(tl.float32) + 1024


@triton.jit
def _signed(words, BYTE: tl.constexpr):
    return (words << (24 - 8 * BYTE) >> 24).to(tl.float32)


@triton.jit
def _dot(x, a, b, c, d):
    """Products of x's quarters [CHUNKS, 4] with four weights of each word [N, CHUNKS, 4], added up -> [N, CHUNKS]"""
    sums = x[0][None, :, :] * a
    sums += x[1][None, :, :] * b
    sums += x[2][None, :, :] * c
    sums += x[3][None, :, :] * d
    return tl.sum(sums, 2)


@triton.jit
def _chunk_sums(
    low,
    high,
    of_x,
    words,
    scale,
    minimum,
    FLOAT: tl.constexpr,
    ZERO: tl.constexpr,
    BITS: tl.constexpr,
    ASM: tl.constexpr,
):
    """Products of x with one tile, added up within chunks -> [N, CHUNKS]

    low, high: quarters of x [CHUNKS, 4] float32; of_x [CHUNKS]: their sum; words [N, CHUNKS, 4] int32; scale and
    minimum [N, CHUNKS], or None.
    """
    if BITS == 4:
        a, b, c, d = _four_nibbles(words, ASM)
        sums = _dot(low, a, b, c, d)
        a, b, c, d = _four_nibbles(words >> 4, ASM)
        sums += _dot(high, a, b, c, d) - (1024 + ZERO) * of_x[None, :]
    elif FLOAT:
        a, b, c, d = _four_float8(words, ASM)
        sums = _dot(low, a, b, c, d)
    else:
        sums = _dot(low, _signed(words, 0), _signed(words, 1), _signed(words, 2), _signed(words, 3))
    if scale is not None:
        sums *= scale
    if minimum is not None:
        sums += minimum * of_x[None, :]
    return sums


@triton.jit
def _of_chunks(values, outputs, chunk, valid, GROUPS: tl.constexpr, PER_GROUP: tl.constexpr):
    """The scale of each chunk of each output, [N, CHUNKS] float32."""
    places = outputs.to(tl.int64)[:, None] * GROUPS + (chunk // PER_GROUP)[None, :]
    return tl.load(values + places, mask=valid, other=0.0).to(tl.float32)


@triton.jit
def _quantized_gemv_kernel(
    x,
    weight,
    scale,
    minimum,
    bias,
    norm,
    out,
    eps,
    N: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    BITS: tl.constexpr,
    FLOAT: tl.constexpr,
    ZERO: tl.constexpr,
    ASM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CHUNKS: tl.constexpr,
    GATED: tl.constexpr,
    RESIDUAL: tl.constexpr,
    PDL: tl.constexpr,
):
    BYTES: tl.constexpr = 16
    IN_CHUNK: tl.constexpr = BYTES * 8 // BITS
    HALF: tl.constexpr = BLOCK // 2
    ALL_CHUNKS: tl.constexpr = K // IN_CHUNK
    GROUPS: tl.constexpr = (K + GROUP - 1) // GROUP
    PER_GROUP: tl.constexpr = GROUP // IN_CHUNK
    IN_ROW: tl.constexpr = GROUPS == 1 and minimum is None  # one scale for a row: applied at the end
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    chunk = tl.arange(0, CHUNKS)
    byte = tl.arange(0, BYTES)
    is_output = outputs < N
    WORDS: tl.constexpr = K * BITS // 32  # of a row
    in_rows = (chunk * 4)[None, :, None] + tl.arange(0, 4)[None, None, :]
    first = weight + outputs.to(tl.int64)[:, None, None] * WORDS + in_rows
    second = first + N * WORDS  # of the up half, with GATED
    inner = is_output[:, None] & (chunk < ALL_CHUNKS)[None, :]
    tile = tl.load(first, mask=inner[:, :, None], other=0)
    tile_up = tl.load(second, mask=inner[:, :, None], other=0) if GATED else tile
    pdl_wait(PDL)
    if RESIDUAL:  # loaded together with x, not after the sums
        addend = tl.load(out + outputs, mask=is_output, other=0.0).to(tl.float32)
    acc = tl.zeros([BLOCK_N, CHUNKS], tl.float32)
    acc_up = tl.zeros([BLOCK_N, CHUNKS], tl.float32)
    squares = tl.zeros([CHUNKS], tl.float32)
    for begin in range(0, ALL_CHUNKS, CHUNKS):
        inside = begin + chunk < ALL_CHUNKS
        inner = is_output[:, None] & inside[None, :]
        input_ = (begin + chunk)[:, None] * IN_CHUNK + byte[None, :]
        if BITS == 4:
            at = (begin + chunk) * BYTES
            input_ = (at // HALF * BLOCK + at % HALF)[:, None] + byte[None, :]
        low = tl.load(x + input_, mask=inside[:, None], other=0.0).to(tl.float32)
        high = tl.load(x + HALF + input_, mask=inside[:, None], other=0.0).to(tl.float32) if BITS == 4 else low
        if norm is not None:
            squares += tl.sum(low * low, 1)
            low *= tl.load(norm + input_, mask=inside[:, None], other=0.0).to(tl.float32)
            if BITS == 4:
                squares += tl.sum(high * high, 1)
                high *= tl.load(norm + HALF + input_, mask=inside[:, None], other=0.0).to(tl.float32)
        ahead = is_output[:, None] & (begin + CHUNKS + chunk < ALL_CHUNKS)[None, :]
        coming = tl.load(first + (begin + CHUNKS) * 4, mask=ahead[:, :, None], other=0)
        if GATED:
            coming_up = tl.load(second + (begin + CHUNKS) * 4, mask=ahead[:, :, None], other=0)
        low_quarters = _quarters(low)
        high_quarters = _quarters(high) if BITS == 4 else low_quarters
        of_x = tl.sum(low, 1)
        if BITS == 4:
            of_x += tl.sum(high, 1)
        of_chunks = None if IN_ROW else _of_chunks(scale, outputs, begin + chunk, inner, GROUPS, PER_GROUP)
        minimums = None
        if minimum is not None:
            minimums = _of_chunks(minimum, outputs, begin + chunk, inner, GROUPS, PER_GROUP)
        acc += _chunk_sums(low_quarters, high_quarters, of_x, tile, of_chunks, minimums, FLOAT, ZERO, BITS, ASM)
        tile = coming
        if GATED:
            if not IN_ROW:
                of_chunks = _of_chunks(scale + N * GROUPS, outputs, begin + chunk, inner, GROUPS, PER_GROUP)
            if minimum is not None:
                minimums = _of_chunks(minimum + N * GROUPS, outputs, begin + chunk, inner, GROUPS, PER_GROUP)
            acc_up += _chunk_sums(
                low_quarters, high_quarters, of_x, tile_up, of_chunks, minimums, FLOAT, ZERO, BITS, ASM
            )
            tile_up = coming_up
    y = tl.sum(acc, 1)
    y_up = tl.sum(acc_up, 1)
    if IN_ROW:
        y *= tl.load(scale + outputs, mask=is_output, other=0.0).to(tl.float32)
        if GATED:
            y_up *= tl.load(scale + N + outputs, mask=is_output, other=0.0).to(tl.float32)
    if norm is not None:
        inverse_rms = tl.rsqrt(tl.sum(squares, 0) / K + eps)
        y *= inverse_rms
        y_up *= inverse_rms
    if bias is not None:
        y += tl.load(bias + outputs, mask=is_output, other=0.0).to(tl.float32)
    if GATED:
        if bias is not None:
            y_up += tl.load(bias + N + outputs, mask=is_output, other=0.0).to(tl.float32)
        y = y / (1.0 + tl.exp(-y)) * y_up
    if RESIDUAL:
        y += addend
    tl.store(out + outputs, y.to(out.dtype.element_ty), mask=is_output)
