"""`Kernels` in PyTorch: the definition of what every device computes. Runs everywhere; knows no model."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F

from mini_sglang.kernels.cpu.linear import CpuMatrix
from mini_sglang.kernels.interface import (
    PLAIN_EXPERTS,
    Experts,
    ExpertVariant,
    Kernels,
    KVCells,
    Matrix,
    Norm,
    Residual,
    Rotation,
)
from mini_sglang.kernels.torch_experts import TorchExperts, each_bias
from mini_sglang.weights.quantized_weight import QuantizedWeight


class TorchKernels:
    """Plain PyTorch, on any device and in any dtype. `prepack` lays weights out for oneDNN, on a CPU that has it."""

    def __init__(self, *, prepack: bool = False) -> None:
        self._prepack = prepack

    def matrix(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Matrix:
        return CpuMatrix(self, weight, bias) if self._prepack else TorchMatrix(self, weight, bias)

    def quantized_matrix(self, weight: QuantizedWeight, bias: torch.Tensor | None) -> Matrix | None:
        return None

    def experts(
        self, gate_up: torch.Tensor, down: torch.Tensor, variant: ExpertVariant = PLAIN_EXPERTS
    ) -> TorchExperts:
        return dense_experts(self, gate_up, down, variant)

    def quantized_experts(
        self, gate_up: QuantizedWeight, down: QuantizedWeight, number: int, variant: ExpertVariant = PLAIN_EXPERTS
    ) -> Experts | None:
        return None

    def route(self, logits: torch.Tensor, top_k: int, *, normalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
        weights, ids = logits.softmax(-1, dtype=torch.float32).topk(top_k)
        return ids.int(), weights / weights.sum(-1, keepdim=True) if normalize else weights

    def embedding(self, token_ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return F.embedding(token_ids, table)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return F.rms_norm(x, weight.shape, weight, eps)

    def rope_store(
        self,
        qkv: torch.Tensor,
        rotation: Rotation,
        target: KVCells,
        q_norm: torch.Tensor | None,
        k_norm: torch.Tensor | None,
        eps: float,
    ) -> torch.Tensor:
        kv_heads, head_dim = target.keys.shape[1:]
        heads = qkv.view(qkv.shape[0], -1, head_dim)
        num_heads = heads.shape[1] - 2 * kv_heads
        qk, v = heads.split((num_heads + kv_heads, kv_heads), dim=1)
        if q_norm is not None and k_norm is not None:
            q, k = qk.split((num_heads, kv_heads), dim=1)
            qk = torch.cat((self.rms_norm(q, q_norm, eps), self.rms_norm(k, k_norm, eps)), dim=1)
        cos, signed_sin = rotation.per_token
        # rolling by half a head swaps the halves; signed_sin has the sign
        rotated: torch.Tensor = torch.addcmul(qk * cos, qk.roll(head_dim // 2, -1), signed_sin)
        target.store(rotated[:, num_heads:], v)
        return rotated[:, :num_heads]

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        gated: torch.Tensor = F.silu(gate).mul_(up)
        return gated


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """`F.linear` of x [T, in], with the `out` argument that PyTorch's lacks."""
    if out is None:
        return F.linear(x, weight, bias)
    return torch.mm(x, weight.t(), out=out) if bias is None else torch.addmm(bias, x, weight.t(), out=out)


class TorchMatrix:
    """`Matrix` in PyTorch, with the norm and the gate of any `Kernels`."""

    def __init__(self, kernels: Kernels, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._kernels, self.weight, self._bias = kernels, weight, bias

    def matmul(self, x: torch.Tensor, norm: Norm | None = None, out: torch.Tensor | None = None) -> torch.Tensor:
        if norm is not None:
            x = self._kernels.rms_norm(x, norm.weight, norm.eps)
        return linear(x, self.weight, self._bias, out)

    def gated(self, x: torch.Tensor, norm: Norm | None, prefetch: torch.Tensor | None = None) -> torch.Tensor:
        return self._kernels.silu_mul(self.matmul(x, norm))

    def add_to(self, residual: torch.Tensor, x: torch.Tensor, next_norm: Norm | None = None) -> Residual:
        if self._bias is not None:
            return Residual(residual + self.matmul(x))
        return Residual(residual.addmm_(x, self.weight.t()))  # multiplies and adds in one kernel


def dense_experts(
    kernels: Kernels, gate_up: torch.Tensor, down: torch.Tensor, variant: ExpertVariant = PLAIN_EXPERTS
) -> TorchExperts:
    """gate_up [experts, 2 n, hidden], down [experts, hidden, n], with the gate of `kernels`"""
    matrix = partial(TorchMatrix, kernels)
    gate_ups = list(map(matrix, gate_up, each_bias(variant.gate_up_bias)))
    downs = list(map(matrix, down, each_bias(variant.down_bias)))
    return TorchExperts(gate_ups, downs, variant.clamp)
