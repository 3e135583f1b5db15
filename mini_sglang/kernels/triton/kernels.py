"""`Kernels` for a GPU: the fused Triton kernels behind the interface that a model knows.

It picks the kernel for each matrix and number of rows; the kernels themselves know no interface.
"""

from __future__ import annotations

import torch
from triton import cdiv

from mini_sglang.kernels.interface import KVCells, Matrix, Norm, Residual, Rotation
from mini_sglang.kernels.torch_kernels import linear
from mini_sglang.kernels.triton.embedding import embedding
from mini_sglang.kernels.triton.experts import experts
from mini_sglang.kernels.triton.gemv import MAX_ROWS, gemv
from mini_sglang.kernels.triton.matmul import GROUPED_TILE, Scales, matmul
from mini_sglang.kernels.triton.quantize_rows import quantize_rows
from mini_sglang.kernels.triton.quantized_gemv import PackedWeight, pack, quantized_gemv
from mini_sglang.kernels.triton.rms_norm import rms_norm
from mini_sglang.kernels.triton.rope_store import rope_store
from mini_sglang.kernels.triton.routing import route
from mini_sglang.kernels.triton.silu_mul import silu_mul
from mini_sglang.kernels.triton.small_gemm import gated_tile, split_k_matmul
from mini_sglang.kernels.triton.split_k import num_splits
from mini_sglang.kernels.triton.weight_only import INVARIANT_TILE, dequantize, weight_only_matmul
from mini_sglang.weights.quantized_weight import QuantizedWeight

_MANY_ROWS = 128  # from which it is faster to dequantise a weight for the library than to unpack it for each tile


class TritonKernels:
    """Every operation can be captured in a CUDA graph. With `deterministic` a row's bits depend on no other row."""

    def __init__(self, *, deterministic: bool = False) -> None:
        self._deterministic = deterministic

    def matrix(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Matrix:
        if self._deterministic:
            return InvariantMatrix(weight, bias)
        return TritonMatrix(weight, bias)

    def quantized_matrix(self, weight: QuantizedWeight, bias: torch.Tensor | None) -> Matrix | None:
        packed = pack(weight)
        if packed is None:
            return None
        if packed.is_float8:
            return Float8Matrix(packed, bias, deterministic=self._deterministic)
        return WeightOnlyMatrix(packed, bias, deterministic=self._deterministic)

    def experts(self, gate_up: torch.Tensor, down: torch.Tensor) -> TritonExperts:
        return TritonExperts(gate_up, down, deterministic=self._deterministic)

    def route(self, logits: torch.Tensor, top_k: int, *, normalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
        return route(logits, top_k, normalize=normalize)

    def embedding(self, token_ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return embedding(token_ids, table)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return rms_norm(x, weight, eps)

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
        return silu_mul(gate_up)


class TritonMatrix:
    """`Matrix` on a GPU, with the fastest matrix product for each number of rows.

    One or two rows go through `gemv`, a fused kernel that reads weights at full speed; many go through cuBLAS; for
    numbers in between, see `small_gemm.py`.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight, self._bias = weight, bias

    def matmul(self, x: torch.Tensor, norm: Norm | None = None, out: torch.Tensor | None = None) -> torch.Tensor:
        if _is_few(x):
            return gemv(x, self.weight, bias=self._bias, norm=norm, out=out)
        return linear(_normed(x, norm, self.weight), self.weight, self._bias, out)

    def gated(self, x: torch.Tensor, norm: Norm | None, prefetch: torch.Tensor | None = None) -> torch.Tensor:
        if _is_few(x):
            return gemv(x, self.weight, bias=self._bias, norm=norm, gated=True)
        tile = gated_tile(len(x), self.weight)
        if tile is None:
            return silu_mul(self.matmul(x, norm), prefetch=prefetch)
        return matmul(_normed(x, norm, self.weight), self.weight, self._bias, gated=True, tile=tile)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor, next_norm: Norm | None = None) -> Residual:
        if _is_few(x):
            return Residual(gemv(x, self.weight, bias=self._bias, residual=residual))
        if self._bias is not None:
            return Residual(residual + self.matmul(x))
        if next_norm is not None and (partials := split_k_matmul(x, self.weight)) is not None:
            return Residual(residual, rms_norm(residual, next_norm.weight, next_norm.eps, partials=partials))
        return Residual(residual.addmm_(x, self.weight.t()))  # multiplies and adds in one kernel


class InvariantMatrix:
    """`Matrix` on a GPU whose sums have one order of additions, however many rows there are."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight, self._bias = weight, bias

    def matmul(self, x: torch.Tensor, norm: Norm | None = None, out: torch.Tensor | None = None) -> torch.Tensor:
        return matmul(_normed(x, norm, self.weight), self.weight, self._bias, out=out)

    def gated(self, x: torch.Tensor, norm: Norm | None, prefetch: torch.Tensor | None = None) -> torch.Tensor:
        return matmul(_normed(x, norm, self.weight), self.weight, self._bias, gated=True)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor, next_norm: Norm | None = None) -> Residual:
        return Residual(matmul(x, self.weight, self._bias, residual=residual))


class Float8Matrix:
    """`Matrix` with a weight in float8. One row stays as it is, more are quantised to float8 as well."""

    def __init__(self, weight: PackedWeight, bias: torch.Tensor | None, *, deterministic: bool) -> None:
        self._packed, self._bias, self._deterministic = weight, bias, deterministic
        self.weight = weight.q
        self._scale = weight.scale.float().t().contiguous()
        self._grouped = len(self._scale) > 1

    def matmul(self, x: torch.Tensor, norm: Norm | None = None, out: torch.Tensor | None = None) -> torch.Tensor:
        if self._is_one(x):
            return quantized_gemv(x, self._packed, bias=self._bias, norm=norm, out=out)
        return self._multiply(x, norm, out=out)

    def gated(self, x: torch.Tensor, norm: Norm | None, prefetch: torch.Tensor | None = None) -> torch.Tensor:
        if self._is_one(x):
            return quantized_gemv(x, self._packed, bias=self._bias, norm=norm, gated=True)
        return self._multiply(x, norm, gated=True)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor, next_norm: Norm | None = None) -> Residual:
        if self._is_one(x):
            return Residual(quantized_gemv(x, self._packed, bias=self._bias, residual=residual))
        return Residual(self._multiply(x, None, residual=residual))

    def _is_one(self, x: torch.Tensor) -> bool:
        return not self._deterministic and len(x) == 1

    def _multiply(
        self,
        x: torch.Tensor,
        norm: Norm | None,
        *,
        residual: torch.Tensor | None = None,
        gated: bool = False,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        q, scale = quantize_rows(x, norm, grouped=self._grouped, prefetch=self.weight)
        scales, splits = Scales(scale, self._scale), 1
        if self._grouped and not self._deterministic:
            tiles = cdiv(len(x), GROUPED_TILE.rows) * cdiv(len(self.weight), GROUPED_TILE.columns)
            splits = num_splits(tiles, x.shape[1])
        if residual is None and out is None:
            out = x.new_empty(len(x), len(self.weight) // 2 if gated else len(self.weight))
        return matmul(q, self.weight, self._bias, residual, scales=scales, gated=gated, out=out, splits=splits)


class WeightOnlyMatrix:
    """`Matrix` with a weight in 4 or 8 bits, and activations as they are."""

    def __init__(self, weight: PackedWeight, bias: torch.Tensor | None, *, deterministic: bool) -> None:
        self._packed, self._bias, self._deterministic = weight, bias, deterministic
        self._tile = INVARIANT_TILE if deterministic else None
        self.weight = weight.q

    def matmul(self, x: torch.Tensor, norm: Norm | None = None, out: torch.Tensor | None = None) -> torch.Tensor:
        if self._is_one(x):
            return quantized_gemv(x, self._packed, bias=self._bias, norm=norm, out=out)
        x = _normed(x, norm, self.weight)
        if self._are_many(x):
            return linear(x, dequantize(self._packed, x.dtype), self._bias, out)
        return weight_only_matmul(x, self._packed, self._bias, out=out, tile=self._tile)

    def gated(self, x: torch.Tensor, norm: Norm | None, prefetch: torch.Tensor | None = None) -> torch.Tensor:
        if self._is_one(x):
            return quantized_gemv(x, self._packed, bias=self._bias, norm=norm, gated=True)
        if self._are_many(x):
            return silu_mul(self.matmul(x, norm))
        x = _normed(x, norm, self.weight)
        return weight_only_matmul(x, self._packed, self._bias, gated=True, tile=self._tile)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor, next_norm: Norm | None = None) -> Residual:
        if self._is_one(x):
            return Residual(quantized_gemv(x, self._packed, bias=self._bias, residual=residual))
        if self._are_many(x):
            return Residual(residual + self.matmul(x))
        return Residual(weight_only_matmul(x, self._packed, self._bias, residual, tile=self._tile))

    def _is_one(self, x: torch.Tensor) -> bool:
        return not self._deterministic and len(x) == 1

    def _are_many(self, x: torch.Tensor) -> bool:
        return not self._deterministic and len(x) > _MANY_ROWS


class TritonExperts:
    """`Experts` on a GPU. With `deterministic` a token's sums have one order, however many tokens there are."""

    def __init__(self, gate_up: torch.Tensor, down: torch.Tensor, *, deterministic: bool) -> None:
        self._gate_up, self._down, self._deterministic = gate_up, down, deterministic

    def add_to(self, residual: torch.Tensor, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return experts(residual, x, ids, weights, self._gate_up, self._down, deterministic=self._deterministic)


def _normed(x: torch.Tensor, norm: Norm | None, prefetch: torch.Tensor) -> torch.Tensor:
    return x if norm is None else rms_norm(x, norm.weight, norm.eps, prefetch=prefetch)


def _is_few(x: torch.Tensor) -> bool:
    return 0 < len(x) <= MAX_ROWS
