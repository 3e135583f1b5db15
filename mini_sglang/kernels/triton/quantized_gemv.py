"""Matrix products of one or two rows with a weight in 4 or 8 bits, limited by how fast the weight can be read.

The same as `gemv.py`, with the norm before and the gate or residual after in one launch, over a weight that is kept as
it is stored: activations stay as they are, sums are float32. A thread reads 16 bytes of a row at a time, a chunk, whose
weights share a scale: so it multiplies by the scale once for each chunk. The kernel stands beside its PyTorch twin.
"""

# Pointers and scalars of a Triton kernel have no Python types:
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from mini_sglang.kernels.interface import FP8, Norm
from mini_sglang.kernels.triton.gemv import MAX_ROWS, gemv_reference
from mini_sglang.kernels.triton.pdl import pdl_launch, pdl_wait
from mini_sglang.weights.quantized_weight import QuantizedWeight

_CHUNK_BYTES = 16


@dataclass(frozen=True)
class PackedWeight:
    """W [N, K] in bytes as the kernels read them: w = scale * (q - zero) + minimum, by groups of a row's inputs.

    Of 4 bits, byte j of a chunk holds weight j of its 32 in the low half and weight 16 + j in the high half.
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
    def is_float8(self) -> bool:
        """Whether products in float8 can take it: by its scales, for rows or for 128 inputs each."""
        return self.q.dtype == FP8 and (self.group_size in (128, self.q.shape[1])) and self.q.shape[1] % 16 == 0

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)"""
        return self.q.shape[0], self.q.shape[1] * 8 // self.bits

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        """-> W [N, K]"""
        return QuantizedWeight(unpacked(self.q), *self._grouped(), self.group_size).dense().to(dtype)

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
    q = weight.q.contiguous()
    if bits == 4:
        halves = q.view(len(q), -1, 2, _CHUNK_BYTES)
        q = (halves[:, :, 0] | halves[:, :, 1] << 4).view(len(q), -1)
    group = min(weight.group_size, columns)
    return PackedWeight(
        q, _in_few_bytes(weight.scale), None if minimum is None else _in_few_bytes(minimum), zero, group
    )


def unpacked(q: torch.Tensor) -> torch.Tensor:
    """The values [N, K] of a packed weight's q."""
    if q.dtype != torch.uint8:
        return q
    halves = q.view(len(q), -1, _CHUNK_BYTES)
    return torch.stack((halves & 15, halves >> 4), 2).view(len(q), -1)


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
    chunks = triton.next_power_of_2(k * bits // (8 * _CHUNK_BYTES))
    return QuantizedGemvTuning(block_n=4 if gated else 8, chunks=min(32, chunks))


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
    """`gemv` with a packed weight: x [rows, K], rows contiguous, at most MAX_ROWS -> [rows, N], or [rows, N / 2] gated

    Raises ValueError for more rows or other layouts.
    """
    rows, k = x.shape
    n = weight.shape[0] // 2 if gated else weight.shape[0]
    if rows > MAX_ROWS or x.stride(1) != 1:
        raise ValueError(f"quantized_gemv takes at most {MAX_ROWS} contiguous rows, got {rows}, strides {x.stride()}")
    if residual is not None:
        out = residual
    if out is None:
        out = torch.empty(rows, n, dtype=x.dtype, device=x.device)
    elif not out.is_contiguous():
        raise ValueError("the residual and `out` must be contiguous")
    tuning = tuning or quantized_gemv_tuning(n, k, weight.bits, gated=gated)
    _quantized_gemv_kernel[(triton.cdiv(n, tuning.block_n),)](
        x,
        weight.q,
        weight.scale,
        weight.minimum,
        bias,
        None if norm is None else norm.weight,
        out,
        x.stride(0),
        rows,
        0.0 if norm is None else norm.eps,
        N=n,
        K=k,
        GROUP=weight.group_size,
        BITS=weight.bits,
        ZERO=weight.zero,
        ROWS=triton.next_power_of_2(rows),
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


@triton.jit
def _chunk_sums(low, high, q, scale, minimum, ZERO: tl.constexpr, BITS: tl.constexpr):
    """Products of x with one tile, added up within chunks. low, high [ROWS, CHUNKS, 16]; q [N, CHUNKS, 16]

    -> [ROWS, N, CHUNKS]; scale and minimum [N, CHUNKS], or None.
    """
    if BITS == 4:
        sums = tl.sum(low[:, None, :, :] * (q & 15).to(tl.float32)[None, :, :, :], 3)
        sums += tl.sum(high[:, None, :, :] * (q >> 4).to(tl.float32)[None, :, :, :], 3)
        of_x = tl.sum(low + high, 2)[:, None, :]
    else:
        sums = tl.sum(low[:, None, :, :] * q.to(tl.float32)[None, :, :, :], 3)
        of_x = tl.sum(low, 2)[:, None, :]
    if ZERO != 0:
        sums -= ZERO * of_x
    if scale is not None:
        sums *= scale[None, :, :]
    if minimum is not None:
        sums += minimum[None, :, :] * of_x
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
    x_stride,
    rows,
    eps,
    N: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    ZERO: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CHUNKS: tl.constexpr,
    GATED: tl.constexpr,
    RESIDUAL: tl.constexpr,
    PDL: tl.constexpr,
):
    BYTES: tl.constexpr = 16
    IN_CHUNK: tl.constexpr = BYTES * 8 // BITS
    ALL_CHUNKS: tl.constexpr = K // IN_CHUNK
    GROUPS: tl.constexpr = (K + GROUP - 1) // GROUP
    PER_GROUP: tl.constexpr = GROUP // IN_CHUNK
    IN_ROW: tl.constexpr = GROUPS == 1 and minimum is None  # one scale for a row: applied at the end
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.arange(0, ROWS)
    chunk = tl.arange(0, CHUNKS)
    byte = tl.arange(0, BYTES)
    is_output = outputs < N
    first = (
        weight
        + outputs.to(tl.int64)[:, None, None] * (K * BITS // 8)
        + (chunk * BYTES)[None, :, None]
        + byte[None, None, :]
    )
    second = first + N * (K * BITS // 8)  # of the up half, with GATED
    inner = is_output[:, None] & (chunk < ALL_CHUNKS)[None, :]
    tile = tl.load(first, mask=inner[:, :, None], other=0.0)
    tile_up = tl.load(second, mask=inner[:, :, None], other=0.0) if GATED else tile
    places = out + (row * N)[:, None] + outputs[None, :]
    mask = (row < rows)[:, None] & is_output[None, :]
    pdl_wait(PDL)
    if RESIDUAL:  # loaded together with x, not after the sums
        addend = tl.load(places, mask=mask, other=0.0).to(tl.float32)
    acc = tl.zeros([ROWS, BLOCK_N, CHUNKS], tl.float32)
    acc_up = tl.zeros([ROWS, BLOCK_N, CHUNKS], tl.float32)
    squares = tl.zeros([ROWS, CHUNKS], tl.float32)
    for begin in range(0, ALL_CHUNKS, CHUNKS):
        inside = begin + chunk < ALL_CHUNKS
        inner = is_output[:, None] & inside[None, :]
        input_ = (begin + chunk)[:, None] * IN_CHUNK + byte[None, :]
        loaded = (row < rows)[:, None, None] & inside[None, :, None]
        low = tl.load(x + (row * x_stride)[:, None, None] + input_[None, :, :], mask=loaded, other=0.0).to(tl.float32)
        high = low
        if BITS == 4:
            places_high = x + (row * x_stride)[:, None, None] + (BYTES + input_)[None, :, :]
            high = tl.load(places_high, mask=loaded, other=0.0).to(tl.float32)
        if norm is not None:
            squares += tl.sum(low * low, 2)
            low *= tl.load(norm + input_, mask=inside[:, None], other=0.0).to(tl.float32)[None, :, :]
            if BITS == 4:
                squares += tl.sum(high * high, 2)
                high *= tl.load(norm + BYTES + input_, mask=inside[:, None], other=0.0).to(tl.float32)[None, :, :]
        ahead = is_output[:, None] & (begin + CHUNKS + chunk < ALL_CHUNKS)[None, :]
        coming = tl.load(first + (begin + CHUNKS) * BYTES, mask=ahead[:, :, None], other=0.0)
        if GATED:
            coming_up = tl.load(second + (begin + CHUNKS) * BYTES, mask=ahead[:, :, None], other=0.0)
        of_chunks = None if IN_ROW else _of_chunks(scale, outputs, begin + chunk, inner, GROUPS, PER_GROUP)
        minimums = None
        if minimum is not None:
            minimums = _of_chunks(minimum, outputs, begin + chunk, inner, GROUPS, PER_GROUP)
        acc += _chunk_sums(low, high, tile, of_chunks, minimums, ZERO, BITS)
        tile = coming
        if GATED:
            if not IN_ROW:
                of_chunks = _of_chunks(scale + N * GROUPS, outputs, begin + chunk, inner, GROUPS, PER_GROUP)
            if minimum is not None:
                minimums = _of_chunks(minimum + N * GROUPS, outputs, begin + chunk, inner, GROUPS, PER_GROUP)
            acc_up += _chunk_sums(low, high, tile_up, of_chunks, minimums, ZERO, BITS)
            tile_up = coming_up
    y = tl.sum(acc, 2)
    y_up = tl.sum(acc_up, 2)
    if IN_ROW:
        y *= tl.load(scale + outputs, mask=is_output, other=0.0).to(tl.float32)[None, :]
        if GATED:
            y_up *= tl.load(scale + N + outputs, mask=is_output, other=0.0).to(tl.float32)[None, :]
    if norm is not None:
        inverse_rms = tl.rsqrt(tl.sum(squares, 1) / K + eps)[:, None]
        y *= inverse_rms
        y_up *= inverse_rms
    if bias is not None:
        y += tl.load(bias + outputs, mask=is_output, other=0.0).to(tl.float32)[None, :]
    if GATED:
        if bias is not None:
            y_up += tl.load(bias + N + outputs, mask=is_output, other=0.0).to(tl.float32)[None, :]
        y = y / (1.0 + tl.exp(-y)) * y_up
    if RESIDUAL:
        y += addend
    tl.store(places, y.to(out.dtype.element_ty), mask=mask)
