"""The operations between matrix products: what every device's kernels compute, written out in PyTorch.

`TorchKernels` is the definition and runs everywhere; `cpu/kernels.py` and `triton/kernels.py` have faster ones. A model
gets one object with these methods and knows no device.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol, TypeVar

import torch
import torch.nn.functional as F

N = TypeVar("N")

FP8 = torch.float8_e4m3fn  # sign, 4 bits of exponent, 3 of mantissa; no infinity
FP8_MAX = 448.0


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

    keys: torch.Tensor  # [num_cells, kv_heads, head_dim] of the pool's dtype
    values: torch.Tensor  # [num_cells, kv_heads, head_dim] of the pool's dtype
    cells: torch.Tensor  # [T] int64

    def store(self, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write k and v [T, kv_heads, head_dim], in the pool's dtype."""
        for cells, new in ((self.keys, k), (self.values, v)):
            movable(cells).index_copy_(0, self.cells, movable(as_stored(new, cells.dtype)))


def as_stored(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x in a pool's dtype. Beyond ±448, where float8_e4m3fn ends, values saturate; a plain conversion may give NaN."""
    return (x.clamp(-FP8_MAX, FP8_MAX) if dtype == FP8 else x).to(dtype)


def movable(x: torch.Tensor) -> torch.Tensor:
    """x, or its bytes where it holds float8, which PyTorch cannot read and write by index on every device"""
    return x.view(torch.uint8) if x.dtype == FP8 else x


@dataclass(frozen=True)
class Norm:
    """An RMSNorm's parameters, as they are handed to the product behind it."""

    weight: torch.Tensor  # [n]
    eps: float


class Residual(NamedTuple):
    """The residual stream of T tokens, and its next norm where the product that was added last has made it too."""

    x: torch.Tensor  # [T, n]
    normed: torch.Tensor | None = None  # [T, n]

    def before(self, norm: N | None) -> tuple[torch.Tensor, N | None]:
        """What the next product, with `norm` in front, takes: its input, and the norm that is left to do"""
        return (self.x, norm) if self.normed is None else (self.normed, None)


class Matrix(Protocol):
    """Weights W [out, in] and perhaps a bias, laid out for a device, and what a layer does with them. T tokens."""

    @property
    def weight(self) -> torch.Tensor | None:
        """As it is read, [out, in] contiguous; None where it was laid out in another way."""
        ...

    def matmul(self, x: torch.Tensor, norm: Norm | None = None, out: torch.Tensor | None = None) -> torch.Tensor:
        """x W^T + bias, of x or of its norm. x [T, in] -> [T, out], in `out` (contiguous) where that is given"""
        ...

    def gated(self, x: torch.Tensor, norm: Norm | None, prefetch: torch.Tensor | None = None) -> torch.Tensor:
        """silu(first half) * second half of the product of x, or of its norm. x [T, in] -> [T, out / 2]

        `prefetch` is the weight that is needed next: a device may begin to fetch it.
        """
        ...

    def add_to(self, residual: torch.Tensor, x: torch.Tensor, then: Norm | None = None) -> Residual:
        """residual [T, out] + the product of x [T, in] -> [T, out]; may overwrite `residual`

        `then` is the norm that reads the sum, for who computes it at less cost here than in front of the next product.
        """
        ...


class Experts(Protocol):
    """The gated MLPs of a mixture of experts, laid out for a device. T tokens, k experts for each."""

    def add_to(self, residual: torch.Tensor, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """residual [T, hidden] + for each token the sum over its k experts of weight * down(silu(gate(x)) * up(x)).

        x [T, hidden]; ids [T, k] int32 and weights [T, k] float32, as `Kernels.route` gives them -> [T, hidden]; may
        overwrite `residual`
        """
        ...


class Kernels(Protocol):
    """T tokens; activations and weights have the model's dtype, arithmetic is float32. Results are new tensors."""

    def matrix(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Matrix:
        """weight [out, in], which the matrix keeps; bias [out]"""
        ...

    def experts(self, gate_up: torch.Tensor, down: torch.Tensor) -> Experts:
        """gate_up [experts, 2 n, hidden], gate above up, and down [experts, hidden, n]; both are kept, and may be
        filled later
        """
        ...

    def route(self, logits: torch.Tensor, top_k: int, *, normalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """The `top_k` experts of each token by the softmax over all, and their weights, with `normalize` of sum 1.

        logits [T, experts] -> ids [T, k] int32, different in a row, and weights [T, k] float32
        """
        ...

    def embedding(self, token_ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """Rows of a table [V, n]. token_ids [T] int32 or int64 -> [T, n]"""
        ...

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

    def matrix(self, weight: torch.Tensor, bias: torch.Tensor | None) -> TorchMatrix:
        return TorchMatrix(self, weight, bias)

    def experts(self, gate_up: torch.Tensor, down: torch.Tensor) -> TorchExperts:
        return TorchExperts(self, gate_up, down)

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
        cos, signed_sin = rotation.of_tokens
        # rolling by half a head swaps the halves; the sign lies in the table
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
    """`F.linear` of x [T, in], which has no `out` of its own."""
    if out is None:
        return F.linear(x, weight, bias)
    return torch.mm(x, weight.t(), out=out) if bias is None else torch.addmm(bias, x, weight.t(), out=out)


class TorchMatrix:
    """`Matrix` in PyTorch, around the norm and the gating of any kernels."""

    def __init__(self, kernels: Kernels, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._kernels, self.weight, self._bias = kernels, weight, bias

    def matmul(self, x: torch.Tensor, norm: Norm | None = None, out: torch.Tensor | None = None) -> torch.Tensor:
        if norm is not None:
            x = self._kernels.rms_norm(x, norm.weight, norm.eps)
        return linear(x, self.weight, self._bias, out)

    def gated(self, x: torch.Tensor, norm: Norm | None, prefetch: torch.Tensor | None = None) -> torch.Tensor:
        return self._kernels.silu_mul(self.matmul(x, norm))

    def add_to(self, residual: torch.Tensor, x: torch.Tensor, then: Norm | None = None) -> Residual:
        if self._bias is not None:
            return Residual(residual + self.matmul(x))
        return Residual(residual.addmm_(x, self.weight.t()))  # the product is added where it is made


class TorchExperts:
    """`Experts` in PyTorch, around the products and the gating of any kernels: two products per touched expert.

    The sum over a token's experts runs in the order of its ids, whatever other tokens there are. The host reads how
    many tokens each expert has, so this cannot lie in a CUDA graph.
    """

    def __init__(self, kernels: Kernels, gate_up: torch.Tensor, down: torch.Tensor) -> None:
        self._kernels = kernels
        self._gate_up = [kernels.matrix(weight, None) for weight in gate_up]
        self._down = [kernels.matrix(weight, None) for weight in down]

    def add_to(self, residual: torch.Tensor, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        flat, per_token = ids.flatten(), ids.shape[1]
        outputs = x.new_empty(len(flat), x.shape[1])
        by_expert = flat.argsort(stable=True).split(flat.bincount(minlength=len(self._down)).tolist())
        for gate_up, down, places in zip(self._gate_up, self._down, by_expert, strict=True):
            if len(places):  # in `flat`: where tokens chose this expert
                gated = self._kernels.silu_mul(gate_up.matmul(x[places // per_token]))
                outputs[places] = down.matmul(gated)
        combined = (outputs.view(*ids.shape, x.shape[1]) * weights.unsqueeze(-1)).sum(1)  # float32
        return residual + combined.to(residual.dtype)
