"""`Kernels` for a GPU: the fused Triton kernels behind the interface that a model knows.

It picks the kernel for each matrix and number of rows; the kernels themselves know no interface.
"""

from __future__ import annotations

import torch
from triton import cdiv

from mini_sglang.kernels.interface import (
    PLAIN_EXPERTS,
    ExpertVariant,
    KVCells,
    Matrix,
    Norm,
    Residual,
    Rotation,
)
from mini_sglang.kernels.torch_kernels import linear
from mini_sglang.kernels.triton.embedding import embedding
from mini_sglang.kernels.triton.experts import experts
from mini_sglang.kernels.triton.gemv import MAX_ROWS, gemv
from mini_sglang.kernels.triton.matmul import GROUPED_TILE, Scales, matmul
from mini_sglang.kernels.triton.quantize_rows import quantize_rows
from mini_sglang.kernels.triton.quantized_experts import quantized_experts
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
        return None if packed is None else QuantizedMatrix(packed, bias, deterministic=self._deterministic)

    def experts(
        self, gate_up: torch.Tensor, down: torch.Tensor, variant: ExpertVariant = PLAIN_EXPERTS
    ) -> TritonExperts:
        return TritonExperts(gate_up, down, variant, deterministic=self._deterministic)

    def quantized_experts(
        self, gate_up: QuantizedWeight, down: QuantizedWeight, number: int, variant: ExpertVariant = PLAIN_EXPERTS
    ) -> QuantizedExperts | None:
        packed_gate_up, packed_down = pack(gate_up), pack(down)
        if packed_gate_up is None or packed_down is None:
            return None
        return QuantizedExperts(packed_gate_up, packed_down, number, variant, deterministic=self._deterministic)

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


class QuantizedMatrix:
    """`Matrix` with a weight in 4 or 8 bits. One row is multiplied as it is; for more, see `_product`."""

    def __init__(self, weight: PackedWeight, bias: torch.Tensor | None, *, deterministic: bool) -> None:
        self._packed, self._bias, self._deterministic = weight, bias, deterministic
        self.weight = weight.q
        self._scale = weight.scale.float().t().contiguous() if weight.is_float8 else None

    def matmul(self, x: torch.Tensor, norm: Norm | None = None, out: torch.Tensor | None = None) -> torch.Tensor:
        return self._product(x, norm, out=out)

    def gated(self, x: torch.Tensor, norm: Norm | None, prefetch: torch.Tensor | None = None) -> torch.Tensor:
        return self._product(x, norm, gated=True)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor, next_norm: Norm | None = None) -> Residual:
        return Residual(self._product(x, None, residual=residual))

    def _product(
        self,
        x: torch.Tensor,
        norm: Norm | None,
        *,
        residual: torch.Tensor | None = None,
        gated: bool = False,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Float8 weights meet rows in float8. Others are unpacked tile by tile, or as a whole for the library."""
        weight, bias = self._packed, self._bias
        if len(x) == 1 and not self._deterministic:
            return quantized_gemv(x, weight, bias=bias, norm=norm, gated=gated, residual=residual, out=out)
        if self._scale is not None:
            return self._float8_product(x, norm, self._scale, residual=residual, gated=gated, out=out)
        x = _normed(x, norm, self.weight)
        if self._deterministic:
            return weight_only_matmul(x, weight, bias, residual, gated=gated, out=out, tile=INVARIANT_TILE)
        if len(x) <= _MANY_ROWS:
            return weight_only_matmul(x, weight, bias, residual, gated=gated, out=out)
        product = linear(x, dequantize(weight, x.dtype), bias, out)
        if gated:
            return silu_mul(product)
        return product if residual is None else residual + product

    def _float8_product(
        self,
        x: torch.Tensor,
        norm: Norm | None,
        scale: torch.Tensor,
        *,
        residual: torch.Tensor | None,
        gated: bool,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        """`scale`: the weight's, [groups, N]"""
        grouped, columns = len(scale) > 1, len(self.weight)
        q, x_scale = quantize_rows(x, norm, grouped=grouped, prefetch=self.weight)
        splits = 1
        if grouped and not self._deterministic:
            tiles = cdiv(len(x), GROUPED_TILE.rows) * cdiv(columns, GROUPED_TILE.columns)
            splits = num_splits(tiles, x.shape[1])
        if residual is None and out is None:
            out = x.new_empty(len(x), columns // 2 if gated else columns)
        scales = Scales(x_scale, scale)
        return matmul(q, self.weight, self._bias, residual, scales=scales, gated=gated, out=out, splits=splits)


class TritonExperts:
    """`Experts` on a GPU. With `deterministic` a token's sums have one order, however many tokens there are."""

    def __init__(
        self, gate_up: torch.Tensor, down: torch.Tensor, variant: ExpertVariant, *, deterministic: bool
    ) -> None:
        self._gate_up, self._down, self._variant, self._deterministic = gate_up, down, variant, deterministic

    def add_to(self, residual: torch.Tensor, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        matrices = self._gate_up, self._down, self._variant
        return experts(residual, x, ids, weights, *matrices, deterministic=self._deterministic)


class QuantizedExperts:
    """`Experts` with weights in 4 or 8 bits, which meet activations as they are, whatever the number of rows."""

    def __init__(
        self, gate_up: PackedWeight, down: PackedWeight, number: int, variant: ExpertVariant, *, deterministic: bool
    ) -> None:
        self._gate_up, self._down, self._number = gate_up, down, number
        self._variant, self._deterministic = variant, deterministic

    def add_to(self, residual: torch.Tensor, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        packed = self._gate_up, self._down, self._number, self._variant
        return quantized_experts(residual, x, ids, weights, *packed, deterministic=self._deterministic)


def _normed(x: torch.Tensor, norm: Norm | None, prefetch: torch.Tensor) -> torch.Tensor:
    return x if norm is None else rms_norm(x, norm.weight, norm.eps, prefetch=prefetch)


def _is_few(x: torch.Tensor) -> bool:
    return 0 < len(x) <= MAX_ROWS
