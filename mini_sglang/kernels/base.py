"""The small operations between matrix products: what every device's kernels compute, written out in PyTorch.

`TorchKernels` is the definition and runs everywhere; `cpu_kernels.py` has faster ones for a step of few rows on a CPU.
A model gets one object with these methods and knows no device.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F


class Kernels(Protocol):
    """T tokens; every tensor has the model's dtype. Results are new tensors."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x / sqrt(mean(x^2) + eps) * weight over the last dimension, computed in float32. x [..., n], weight [n]"""
        ...

    def rotate(self, heads: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> torch.Tensor:
        """Rotary embedding, half-split: x cos + roll(x, d / 2) signed_sin -> [T, n, d] contiguous

        heads [T, n, d], rows of a head contiguous; cos and signed_sin [T, 1, d].
        """
        ...

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up. gate_up [T, 2 n], gate first -> [T, n]"""
        ...


class TorchKernels:
    """Plain PyTorch, on any device and in any dtype."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return F.rms_norm(x, weight.shape, weight, eps)

    def rotate(self, heads: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> torch.Tensor:
        return torch.addcmul(heads * cos, heads.roll(heads.shape[-1] // 2, -1), signed_sin)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)
