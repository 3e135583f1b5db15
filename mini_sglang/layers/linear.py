"""Linear layers: one matmul over weights that may arrive as several checkpoint tensors.

q, k and v (and the MLP's gate and up) are stacked into one matrix, so that a step reads them in one matmul. When the
last part has arrived (`weights/arriving_matrix.py`), the kernels lay the matrix out for the device. A layer is told
once, when the model is built, which norms stand around it and which weight is read behind its own: kernels may fuse
them. Each rank loads its shards of the parts alone.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from mini_sglang.kernels.interface import Matrix, Norm, Residual
from mini_sglang.layers.norm import NO_NORMS, BlockNorms
from mini_sglang.layers.placement import Placement
from mini_sglang.parallel.sharding import Shard, whole
from mini_sglang.weights.tensor import WeightSlot


class Linear:
    """y = x W^T + bias, W [out, in] stacked from `parts`: part name -> its output rows, in order.

    Sizes that are numbers are whole on every rank. A column-parallel layer has shards for parts: each rank computes
    some outputs. A row-parallel one has a shard of inputs and is `summed`: `add_to` sums over the ranks.

    `norms.before` is applied to what the layer reads, `norms.after` to its output, and `norms.following` reads the sum
    that `add_to` makes. A kernel may prefetch the weight of `prefetched`, the layer that comes next.
    Unless `quantized`, a dense weight stays dense.
    """

    def __init__(
        self,
        in_features: int | Shard,
        parts: Mapping[str, int | Shard],
        placement: Placement,
        *,
        bias: bool = False,
        summed: bool = False,
        norms: BlockNorms = NO_NORMS,
        prefetched: Linear | None = None,
        quantized: bool = True,
    ) -> None:
        shards = {name: _as_shard(rows) for name, rows in parts.items()}
        self._arriving = placement.arriving(shards, _as_shard(in_features), bias=bias, quantized=quantized)
        self.in_features, self.out_features = self._arriving.inputs.size, self._arriving.out_features
        self._placement = placement
        self._summed = summed
        self._norms, self._prefetched = norms, prefetched
        self._laid_out: Matrix | None = None

    def __call__(self, residual: Residual, out: torch.Tensor | None = None) -> torch.Tensor:
        """x [rows, in], normalised first if the layer has a norm before it -> [rows, out]

        In `out` (contiguous) where that is given.
        """
        return self._matrix.matmul(*self._input(residual), out)

    def gated(self, residual: Residual) -> torch.Tensor:
        """x [rows, in], normalised likewise -> silu(first half) * second half of the output [rows, out / 2]"""
        prefetch = None if self._prefetched is None else self._prefetched._matrix.weight
        return self._matrix.gated(*self._input(residual), prefetch)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> Residual:
        """residual [rows, out] + the output for x [rows, in] -> [rows, out]; may overwrite `residual`

        If `summed`, outputs are summed over the ranks before the residual is added; the first rank adds the bias.
        """
        parallel, norm, following = self._placement.parallel, self._norms.after, self._norms.following
        if norm is not None:
            product = self._matrix.matmul(x)
            product = parallel.all_reduce(product) if self._summed else product
            return Residual(residual + self._placement.kernels.rms_norm(product, norm.weight, norm.eps))
        if not self._summed or parallel.size == 1:
            return self._matrix.add_to(residual, x, None if following is None else following.parameters)
        return Residual(parallel.all_reduce(self._matrix.matmul(x), residual))

    def _input(self, residual: Residual) -> tuple[torch.Tensor, Norm | None]:
        """What the matrix multiplies, and the norm that is left to apply to it."""
        if residual.normed is not None:
            return residual.normed, None
        return residual.x, None if self._norms.before is None else self._norms.before.parameters

    @property
    def _matrix(self) -> Matrix:
        assert self._laid_out is not None, f"weights that never arrived: {sorted(self._arriving.missing)}"
        return self._laid_out

    def weight_slots(self, prefix: str) -> dict[str, WeightSlot]:
        """The checkpoint tensors that fill this layer; `prefix` is the path of the module that holds the parts."""
        return self._arriving.slots(prefix, self._lay_out)

    def _lay_out(self) -> None:
        kernels, bias, stored = self._placement.kernels, self._arriving.bias, self._arriving.stored()
        if self._summed and self._placement.parallel.rank > 0:
            bias = None  # added once, by the first rank
        self._laid_out = None if stored is None else kernels.quantized_matrix(stored, bias)
        if self._laid_out is None:
            self._laid_out = kernels.matrix(self._arriving.dense(), bias)
        self._arriving.release()


def _as_shard(size: int | Shard) -> Shard:
    return whole(size) if isinstance(size, int) else size
