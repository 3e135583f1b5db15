"""The operations between matrix products: what every device's kernels compute, written out in PyTorch.

`TorchKernels` is the definition and runs everywhere; `cpu_kernels.py` and `triton_kernels.py` have faster ones. A model
gets one object with these methods and knows no device.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
import torch.nn.functional as F


@dataclass(frozen=True)
class Rotation:
    """The rotary angles of one step: tables over all positions, and the positions of the step's tokens."""

    cos: torch.Tensor  # [context, head_dim / 2]
    sin: torch.Tensor  # [context, head_dim / 2]
    positions: torch.Tensor  # [T] int64

    @cached_property
    def of_tokens(self) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin of each token, for both halves of a head [T, 1, head_dim]; sin is negated in the first half."""
        cos, sin = self.cos[self.positions], self.sin[self.positions]
        return torch.cat((cos, cos), -1).unsqueeze(1), torch.cat((-sin, sin), -1).unsqueeze(1)


@dataclass(frozen=True)
class KVCells:
    """Where the keys and values of one step go in one layer."""

    keys: torch.Tensor  # [num_cells, kv_heads, head_dim]
    values: torch.Tensor  # [num_cells, kv_heads, head_dim]
    cells: torch.Tensor  # [T] int64

    def store(self, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write k and v [T, kv_heads, head_dim]."""
        self.keys.index_copy_(0, self.cells, k)
        self.values.index_copy_(0, self.cells, v)


class Kernels(Protocol):
    """T tokens; activations and weights have the model's dtype, arithmetic is float32. Results are new tensors."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x / sqrt(mean(x^2) + eps) * weight over the last dimension. x [T, n], weight [n]"""
        ...

    def rope_store(
        self,
        qkv: torch.Tensor,
        rotation: Rotation,
        target: KVCells,
        q_norm: torch.Tensor | None,
        k_norm: torch.Tensor | None,
        eps: float,
    ) -> torch.Tensor:
        """Normalise each head of q and k (where norms are given), rotate them, store k and v; returns q.

        qkv [T, (heads + 2 kv_heads) * head_dim]; q_norm and k_norm [head_dim]. Rotation is half-split: with halves
        (a, b) it gives (a cos - b sin, b cos + a sin). -> [T, heads, head_dim]
        """
        ...

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up. gate_up [T, 2 n], gate first -> [T, n]"""
        ...


class TorchKernels:
    """Plain PyTorch, on any device and in any dtype."""

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
        cos, signed_sin = rotation.of_tokens
        # rolling by half a head swaps the halves; the sign lies in the table
        rotated: torch.Tensor = torch.addcmul(qk * cos, qk.roll(head_dim // 2, -1), signed_sin)
        target.store(rotated[:, num_heads:], v)
        return rotated[:, :num_heads]

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        gated: torch.Tensor = F.silu(gate).mul_(up)
        return gated
