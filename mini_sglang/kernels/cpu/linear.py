"""Matrix products on a CPU: weights are laid out once, at load, for the instructions that will read them.

`CpuMatrix` is what a layer sees. `PrepackedMatrix` gives the weight to oneDNN, which has its own blocked layout;
`Int4Matrix` keeps a GGUF file's 4-bit blocks packed, a quarter of the bytes. Both compute y = x W^T + bias for
x [rows, in] and W [out, in].
"""

from __future__ import annotations

import os

import torch

from mini_sglang.kernels.interface import Kernels, Norm, Residual
from mini_sglang.weights.quantized_weight import QuantizedWeight

_EXPECTED_ROWS = 16  # oneDNN picks its blocking for this many rows; every other number works too
_MAX_PACKED_ROWS = 2  # with more, the dense product is faster than unpacking 4-bit blocks for every row
# What oneDNN compiles for one shape and number of rows takes half a megabyte and, made anew, half a millisecond. It is
# kept twice, by oneDNN and by PyTorch's side of it. Left alone, each keeps 1024: half a gigabyte, once prompts have had
# some hundred lengths. A model has about five shapes, so these are the programs of the last 25 step sizes.
_MAX_PROGRAMS = 128
_CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")


class CpuMatrix:
    """`Matrix` of a weight [out, in], which may be freed afterwards; few rows read its 4-bit `blocks`, if given."""

    def __init__(
        self,
        kernels: Kernels,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        blocks: QuantizedWeight | None = None,
    ) -> None:
        self.weight = None
        self._kernels = kernels
        self._dense = PrepackedMatrix(weight, bias)
        self._int4 = Int4Matrix(blocks, bias) if blocks is not None else None

    def matmul(self, x: torch.Tensor, norm: Norm | None = None, out: torch.Tensor | None = None) -> torch.Tensor:
        if norm is not None:
            x = self._kernels.rms_norm(x, norm.weight, norm.eps)
        y = self._dense.multiply(x) if self._int4 is None or len(x) > _MAX_PACKED_ROWS else self._int4.multiply(x)
        return y if out is None else out.copy_(y)

    def gated(self, x: torch.Tensor, norm: Norm | None, prefetch: torch.Tensor | None = None) -> torch.Tensor:
        return self._kernels.silu_mul(self.matmul(x, norm))

    def add_to(self, residual: torch.Tensor, x: torch.Tensor, next_norm: Norm | None = None) -> Residual:
        if self._int4 is None or len(x) > _MAX_PACKED_ROWS:
            return Residual(self._dense.multiply_add(x, residual))
        return Residual(residual + self._int4.multiply(x))

    @staticmethod
    def available(dtype: torch.dtype) -> bool:
        """Whether this torch was built with oneDNN, and oneDNN multiplies `dtype` on this processor."""
        if not torch.backends.mkldnn.is_available():
            return False
        if dtype == torch.bfloat16:
            return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
        return dtype != torch.float16 or bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())


class PrepackedMatrix:
    """A dense float32, bfloat16 or float16 matrix in oneDNN's layout. `weight` [out, in] may be freed afterwards."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        _bound_caches()
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _EXPECTED_ROWS)
        self._bias = bias

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """x W^T + bias. x [rows, in] -> [rows, out]"""
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")
        return y

    def multiply_add(self, x: torch.Tensor, addend: torch.Tensor) -> torch.Tensor:
        """x W^T + bias + addend, in one pass over the output. x [rows, in], addend [rows, out] -> [rows, out]"""
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, addend, self._packed, self._bias, "add")
        return y


def _bound_caches() -> None:
    """Have this process keep few compiled programs, unless its environment says how many.

    The environment is the only way in. Both libraries read it once, when a process first multiplies with oneDNN.
    """
    for capacity in _CACHES:
        os.environ.setdefault(capacity, str(_MAX_PROGRAMS))


class Int4Matrix:
    """A matrix of 4-bit blocks. x and the result are bfloat16; sums are float32.

    torch's packed format computes (q - 8) * scale + zero per group of the input dimension, so a GGUF block
    (w = scale * q + minimum) maps onto it with zero = minimum + 8 * scale.
    """

    def __init__(self, blocks: QuantizedWeight, bias: torch.Tensor | None) -> None:
        zero = 8 * blocks.scale if blocks.minimum is None else blocks.minimum + 8 * blocks.scale
        # [in // group, out, 2], as the kernel walks the input dimension outermost
        self._scales_and_zeros = torch.stack((blocks.scale, zero), dim=-1).transpose(0, 1).contiguous().bfloat16()
        self._packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(blocks.q.int().contiguous(), 1)
        self._group_size = blocks.group_size
        self._bias = bias

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """x W^T + bias. x [rows, in] bfloat16 -> [rows, out] bfloat16"""
        y: torch.Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(
            x, self._packed, self._group_size, self._scales_and_zeros
        )
        return y if self._bias is None else y + self._bias

    @staticmethod
    def supports(blocks: QuantizedWeight) -> bool:
        """Whether the kernel takes it: 4 bits, a multiple of 16 outputs, whole groups of 32, 64, 128 or 256 inputs."""
        out, columns = blocks.q.shape
        suits = out % 16 == 0 and blocks.group_size in (32, 64, 128, 256) and columns % blocks.group_size == 0
        return suits and blocks.q.dtype == torch.uint8
