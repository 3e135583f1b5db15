"""Matrix products on a CPU: weights are laid out once, at load, for the instructions that will read them.

`CpuMatrix` is what a layer sees. `PrepackedMatrix` gives the weight to oneDNN, which has its own blocked layout, and
computes y = x W^T + bias for x [rows, in] and W [out, in]. Quantised weights are `packed.py`'s.
"""

from __future__ import annotations

import os

import torch

from mini_sglang.kernels.interface import Kernels, Norm, Residual

_EXPECTED_ROWS = 16  # oneDNN picks its blocking for this many rows; every other number works too
# What oneDNN compiles for one shape and number of rows takes half a megabyte and, made anew, half a millisecond. It is
# kept twice, by oneDNN and by PyTorch's side of it. Left alone, each keeps 1024: half a gigabyte, once prompts have had
# some hundred lengths. A model has about five shapes, so these are the programs of the last 25 step sizes.
_MAX_PROGRAMS = 128
_CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")


class CpuMatrix:
    """`Matrix` of a dense weight [out, in], which may be freed afterwards."""

    weight = None

    def __init__(self, kernels: Kernels, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._kernels = kernels
        self._dense = PrepackedMatrix(weight, bias)

    def matmul(self, x: torch.Tensor, norm: Norm | None = None, out: torch.Tensor | None = None) -> torch.Tensor:
        if norm is not None:
            x = self._kernels.rms_norm(x, norm.weight, norm.eps)
        y = self._dense.multiply(x)
        return y if out is None else out.copy_(y)

    def gated(self, x: torch.Tensor, norm: Norm | None, prefetch: torch.Tensor | None = None) -> torch.Tensor:
        return self._kernels.silu_mul(self.matmul(x, norm))

    def add_to(self, residual: torch.Tensor, x: torch.Tensor, next_norm: Norm | None = None) -> Residual:
        return Residual(self._dense.multiply_add(x, residual))

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
