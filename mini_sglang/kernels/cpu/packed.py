"""Matrix products with weights in 4 or 8 bits: one copy of them, and one arithmetic for every number of rows.

`PackedMatrix` lays a `QuantizedWeight` out once, at load; `compiled_packed.py` multiplies. Rows of activations are
quantised to 8 bits by blocks of inputs, the sums of a block are exact integers, and a row's result has the same bits
alone and in any batch. Knows no model and no format of a file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from mini_sglang.kernels.cpu.compiled import float_bits
from mini_sglang.kernels.cpu.compiled_packed import ROW_BLOCK_EXTRA, TILE, PackedForm, best_instruction
from mini_sglang.kernels.interface import Norm, Residual
from mini_sglang.weights.quantized_weight import QuantizedWeight

if TYPE_CHECKING:
    from mini_sglang.kernels.cpu.kernels import CpuKernels

_ITEMS_PER_THREAD = 8  # to take in turns, of neighbouring tiles: fewer balance badly, more fetch memory in pieces
_FEW_ROWS = 32  # at most this many are quantised by one thread
_OWN_ROWS = 2  # at most this many are quantised by every thread for itself: a second parallel region costs more


class PackedMatrix:
    """`Matrix` of a quantised weight [out, in] for activations in float32 or bfloat16."""

    weight = None

    def __init__(self, kernels: CpuKernels, weight: QuantizedWeight, bias: torch.Tensor | None) -> None:
        self._kernels, self._bias = kernels, bias
        self._out, self._in = weight.q.shape
        self._group = min(weight.group_size, self._in)
        self._form = form_of(weight)
        self._blocks = weight.scale.shape[1] * -(-self._group // self._form.block)
        self._quantise, self._multiply = kernels.packed_kernels(self._form)
        self._tiles = pack(weight, self._form)

    @staticmethod
    def supports(weight: QuantizedWeight) -> bool:
        return weight.q.dtype in (torch.uint8, torch.int8)

    def matmul(self, x: torch.Tensor, norm: Norm | None = None, out: torch.Tensor | None = None) -> torch.Tensor:
        out = x.new_empty(len(x), self._out) if out is None else out
        return self._product(x, norm, out)

    def gated(self, x: torch.Tensor, norm: Norm | None, prefetch: torch.Tensor | None = None) -> torch.Tensor:
        if self._out % (2 * TILE):  # a tile has outputs of both halves
            return self._kernels.silu_mul(self.matmul(x, norm))
        return self._product(x, norm, x.new_empty(len(x), self._out // 2), gated=True)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor, next_norm: Norm | None = None) -> Residual:
        return Residual(self._product(x, None, x.new_empty(len(x), self._out), addend=residual.contiguous()))

    def _product(
        self,
        x: torch.Tensor,
        norm: Norm | None,
        out: torch.Tensor,
        addend: torch.Tensor | None = None,
        *,
        gated: bool = False,
    ) -> torch.Tensor:
        x = x.contiguous()
        rows = len(x)
        norm_at, eps = (0, 0) if norm is None else (norm.weight.data_ptr(), float_bits(norm.eps))
        x_at, x8_at = x.data_ptr(), 0
        if rows > _OWN_ROWS:
            row_bytes = self._blocks * (self._form.block + ROW_BLOCK_EXTRA)
            x8 = torch.empty(rows * row_bytes, dtype=torch.uint8)
            self._quantise.run(
                *(x_at, norm_at, x8.data_ptr(), rows, self._in, self._group, row_bytes, eps),
                single_thread=rows <= _FEW_ROWS,
            )
            x_at, x8_at = 0, x8.data_ptr()
        tiles_per_item = max(1, len(self._tiles) // (1 + gated) // (torch.get_num_threads() * _ITEMS_PER_THREAD))
        self._multiply.run(
            x8_at,
            self._tiles.data_ptr(),
            0 if self._bias is None else self._bias.data_ptr(),
            0 if addend is None else addend.data_ptr(),
            out.data_ptr(),
            *(rows, self._out, self._blocks, gated, x_at, norm_at, self._in, self._group, tiles_per_item, eps),
        )
        return out


def form_of(weight: QuantizedWeight, instruction: str | None = None) -> PackedForm:
    """How to lay a weight out for an `instruction`, the best one by default: scales in 16 bits if these hold them."""
    instruction = instruction or best_instruction()
    numbers = [weight.scale] if weight.minimum is None else [weight.scale, weight.minimum]
    halves = instruction != "portable" and all(bool((values.half().float() == values).all()) for values in numbers)
    bits, block = 4 if weight.q.dtype == torch.uint8 else 8, 16 if weight.group_size == 16 else 32
    return PackedForm(bits, block, 16 if halves else 32, len(numbers) - 1, instruction)


def pack(weight: QuantizedWeight, form: PackedForm) -> torch.Tensor:
    """Lay a weight out in tiles of 16 outputs -> [tiles, blocks, bytes of a block] uint8

    A tile's block is its weights, 4 consecutive inputs of each output and then the next 4; 16 scales; 16 minimums, if
    the weight has them. Of 4-bit weights a byte holds two: input i in the low half and i + 4 in the high half. Groups
    are filled up with zeros to whole blocks.
    """
    outputs, groups = weight.scale.shape
    group, block = min(weight.group_size, weight.q.shape[1]), form.block
    tiles, blocks_per_group = -(-outputs // TILE), -(-group // block)
    blocks = groups * blocks_per_group
    more_outputs = (0, 0, 0, tiles * TILE - outputs)
    q = _padded(weight.q, (0, groups * group - weight.q.shape[1])).reshape(outputs, groups, group)
    q = _padded(q, (0, blocks_per_group * block - group)).reshape(outputs, blocks * block)
    words = _padded(q, more_outputs).view(torch.int32).view(tiles, TILE, blocks, -1)  # of 4 inputs
    if form.bits == 4:
        words = words[..., ::2] | words[..., 1::2] << 4
    parts = [words.permute(0, 2, 3, 1).reshape(tiles, blocks, -1)]
    for values in [weight.scale] if weight.minimum is None else [weight.scale, weight.minimum]:
        halves = values.to(torch.float16 if form.scale_bits == 16 else torch.float32)
        spread = _padded(halves.repeat_interleave(blocks_per_group, 1), more_outputs).view(tiles, TILE, blocks)
        parts.append(spread.mT.contiguous())
    return torch.cat([part.view(torch.uint8) for part in parts], dim=-1)


def _padded(values: torch.Tensor, widths: tuple[int, ...]) -> torch.Tensor:
    """As `F.pad`, which copies even where there is nothing to add."""
    return F.pad(values, widths) if any(widths) else values
