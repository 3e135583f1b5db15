"""What a model asks of a device: matrix products (with norm, gate or residual), and the operations between them.

A model gets one `Kernels` object and does not know which device it runs on. `torch_kernels.py` defines in PyTorch what
each method computes; `cpu/kernels.py` and `triton/kernels.py` compute the same faster.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

import torch

from mini_sglang.weights.quantized_weight import QuantizedWeight

FP8 = torch.float8_e4m3fn  # sign, 4 bits of exponent, 3 of mantissa; no infinity
FP8_MAX = 448.0


@dataclass(frozen=True)
class Rotation:
    """The rotary angles of one step: tables over all positions, and the positions of the step's tokens."""

    cos: torch.Tensor  # [context, head_dim / 2]
    sin: torch.Tensor  # [context, head_dim / 2]
    positions: torch.Tensor  # [T] int64

    @cached_property
    def per_token(self) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin of each token for both halves of a head, [T, 1, head_dim]; sin is negated in the first half."""
        cos, sin = self.cos[self.positions], self.sin[self.positions]
        return torch.cat((cos, cos), -1).unsqueeze(1), torch.cat((-sin, sin), -1).unsqueeze(1)


@dataclass(frozen=True)
class KVCells:
    """The cells of one layer's KV pool that the keys and values of a step's tokens go to."""

    keys: torch.Tensor  # [num_cells, kv_heads, head_dim] of the pool's dtype
    values: torch.Tensor  # [num_cells, kv_heads, head_dim] of the pool's dtype
    cells: torch.Tensor  # [T] int64: page id * page_size + offset of each token

    def store(self, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write k and v [T, kv_heads, head_dim], in the pool's dtype."""
        for pool, new in ((self.keys, k), (self.values, v)):
            indexable(pool).index_copy_(0, self.cells, indexable(to_kv_dtype(new, pool.dtype)))


def to_kv_dtype(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x in a pool's dtype. Values beyond ±448, where float8_e4m3fn ends, saturate; a plain cast may give NaN."""
    return (x.clamp(-FP8_MAX, FP8_MAX) if dtype == FP8 else x).to(dtype)


def indexable(x: torch.Tensor) -> torch.Tensor:
    """x, or its bytes if it is float8, which PyTorch cannot index on every device."""
    return x.view(torch.uint8) if x.dtype == FP8 else x


@dataclass(frozen=True)
class Norm:
    """The parameters of an RMSNorm, for the matrix product that reads its result."""

    weight: torch.Tensor  # [n]
    eps: float


class Residual(NamedTuple):
    """The residual stream of T tokens, and its next norm if the layer that last added to it has computed that too."""

    x: torch.Tensor  # [T, n]
    normed: torch.Tensor | None = None  # [T, n]


class Matrix(Protocol):
    """Weights W [out, in] and perhaps a bias, laid out for a device, and what a layer does with them. T tokens."""

    @property
    def weight(self) -> torch.Tensor | None:
        """W [out, in], contiguous; None if the device has laid it out in another way."""
        ...

    def matmul(self, x: torch.Tensor, norm: Norm | None = None, out: torch.Tensor | None = None) -> torch.Tensor:
        """x W^T + bias, of x or of its norm. x [T, in] -> [T, out], in `out` (contiguous) if that is given."""
        ...

    def gated(self, x: torch.Tensor, norm: Norm | None, prefetch: torch.Tensor | None = None) -> torch.Tensor:
        """silu(first half) * second half of what `matmul` computes. x [T, in] -> [T, out / 2]

        `prefetch` is the weight that is needed next: a device may begin to fetch it.
        """
        ...

    def add_to(self, residual: torch.Tensor, x: torch.Tensor, next_norm: Norm | None = None) -> Residual:
        """residual [T, out] + what `matmul` computes of x [T, in] -> [T, out]; may overwrite `residual`.

        `next_norm` is the norm that reads the sum: a device computes it here if that costs less than in front of the
        next matrix product.
        """
        ...


class Clamp(NamedTuple):
    """The gate of gpt-oss: min(gate, limit) * sigmoid(alpha * min(gate, limit)) * (up + 1), up within ±limit."""

    alpha: float
    limit: float


class ExpertVariant(NamedTuple):
    """How experts differ from two matrices each and silu(gate) * up."""

    gate_up_bias: torch.Tensor | None = None  # [experts, 2 n]
    down_bias: torch.Tensor | None = None  # [experts, hidden]
    clamp: Clamp | None = None


PLAIN_EXPERTS = ExpertVariant()


class Experts(Protocol):
    """The gated MLPs of a mixture of experts, laid out for a device. T tokens, k experts for each."""

    def add_to(self, residual: torch.Tensor, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """residual [T, hidden] + for each token the sum over its k experts of weight * down(silu(gate(x)) * up(x)).

        x [T, hidden]; ids [T, k] int32 and weights [T, k] float32, as `Kernels.route` returns them -> [T, hidden]; may
        overwrite `residual`.
        """
        ...


class Kernels(Protocol):
    """T tokens; activations and weights have the model's dtype, arithmetic is float32. Results are new tensors."""

    def matrix(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Matrix:
        """Lay out weight [out, in] and bias [out]."""
        ...

    def quantized_matrix(self, weight: QuantizedWeight, bias: torch.Tensor | None) -> Matrix | None:
        """Lay out a weight as it is stored; None if there is no kernel for it, and it has to be dequantised."""
        ...

    def experts(self, gate_up: torch.Tensor, down: torch.Tensor, variant: ExpertVariant = PLAIN_EXPERTS) -> Experts:
        """Lay out gate_up [experts, 2 n, hidden], gate above up, and down [experts, hidden, n]."""
        ...

    def quantized_experts(
        self, gate_up: QuantizedWeight, down: QuantizedWeight, number: int, variant: ExpertVariant = PLAIN_EXPERTS
    ) -> Experts | None:
        """Lay out the same of `number` experts as it is stored, the rows of one expert below those of another.

        None if there is no kernel for it, and it has to be dequantised.
        """
        ...

    def route(self, logits: torch.Tensor, top_k: int, *, normalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose the `top_k` experts of each token, and their weights, by a softmax over all experts.

        logits [T, experts] -> ids [T, k] int32, distinct in a row, and weights [T, k] float32; with `normalize` a row's
        weights add up to 1.
        """
        ...

    def embedding(self, token_ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """The rows of `table` [V, n] that token_ids [T], int32 or int64, select -> [T, n]."""
        ...

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x / sqrt(mean(x^2) + eps) * weight over the last dimension. x [T, n], weight [n] -> [T, n]."""
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
        """Normalise each head of q and k (if norms are given), rotate them, store k and v in `target`, and return q.

        qkv [T, (heads + 2 kv_heads) * head_dim]; q_norm and k_norm [head_dim]. Rotation is half-split: with halves
        (a, b) it gives (a cos - b sin, b cos + a sin). -> [T, heads, head_dim]
        """
        ...

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up. gate_up [T, 2 n], gate first -> [T, n]."""
        ...
