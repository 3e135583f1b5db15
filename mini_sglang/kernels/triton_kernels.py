"""`Kernels` for a GPU: the fused Triton kernels behind the interface that a model knows."""

from __future__ import annotations

import torch

from mini_sglang.kernels import fused_norm, silu_mul
from mini_sglang.kernels.base import KVCells, Rotation
from mini_sglang.kernels.rope_store import rope_store


class TritonKernels:
    """Every operation is one launch and can lie in a CUDA graph."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return fused_norm.rms_norm(x, weight, eps)

    def rope_store(
        self,
        qkv: torch.Tensor,
        rotation: Rotation,
        target: KVCells,
        q_norm: torch.Tensor | None,
        k_norm: torch.Tensor | None,
        eps: float,
    ) -> torch.Tensor:
        return rope_store(
            qkv,
            rotation.positions,
            target.cells,
            rotation.cos,
            rotation.sin,
            target.keys,
            target.values,
            q_norm=q_norm,
            k_norm=k_norm,
            eps=eps,
        )

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        return silu_mul.silu_mul(gate_up)
