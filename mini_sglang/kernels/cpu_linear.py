"""Matrix products on a CPU: weights laid out once, at load, for the instructions that will read them.

`PrepackedMatrix` hands the weight to oneDNN in its own blocked layout; `Int4Matrix` keeps a GGUF file's 4-bit blocks
packed, which reads a quarter of the bytes. Both compute y = x W^T + bias for x [rows, in] and W [out, in].
"""

from __future__ import annotations

import torch

from mini_sglang.weights.tensor import QuantizedBlocks

_EXPECTED_ROWS = 16  # oneDNN picks its blocking for this many rows; every other number works too


class PrepackedMatrix:
    """A dense float32, bfloat16 or float16 matrix in oneDNN's layout. `weight` [out, in] may be freed afterwards."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _EXPECTED_ROWS)
        self._bias = bias

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, in] -> [rows, out]"""
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")
        return y

    def multiply_add(self, x: torch.Tensor, addend: torch.Tensor) -> torch.Tensor:
        """x [rows, in], addend [rows, out] -> [rows, out]: the product plus `addend`, in one pass over the output."""
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, addend, self._packed, self._bias, "add")
        return y

    @staticmethod
    def available() -> bool:
        """Whether this torch was built with oneDNN."""
        return bool(torch.backends.mkldnn.is_available())


class Int4Matrix:
    """A matrix of 4-bit blocks. x and the result are bfloat16; products are accumulated in float32.

    torch's packed format computes (q - 8) * scale + zero per group of the input dimension, so a GGUF block
    (w = scale * q + minimum) maps onto it with zero = minimum + 8 * scale.
    """

    def __init__(self, blocks: QuantizedBlocks, bias: torch.Tensor | None) -> None:
        zero = blocks.minimum + 8 * blocks.scale
        # [in // group, out, 2], as the kernel walks the input dimension outermost
        self._scales_and_zeros = torch.stack((blocks.scale, zero), dim=-1).transpose(0, 1).contiguous().bfloat16()
        self._packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(blocks.q.int().contiguous(), 1)
        self._group_size = blocks.group_size
        self._bias = bias

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, in] bfloat16 -> [rows, out] bfloat16"""
        y: torch.Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(
            x, self._packed, self._group_size, self._scales_and_zeros
        )
        return y if self._bias is None else y + self._bias

    @staticmethod
    def supports(blocks: QuantizedBlocks) -> bool:
        """Whether the kernel takes this shape: output rows come in sixteens, groups in 32, 64, 128 or 256."""
        return blocks.q.shape[0] % 16 == 0 and blocks.group_size in (32, 64, 128, 256)
