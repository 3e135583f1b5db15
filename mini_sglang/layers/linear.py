"""Linear layers: one matmul over weights that may arrive as several checkpoint tensors.

q, k and v (and the MLP's gate and up) are stacked into one matrix, so that a step reads them in one matmul. Each part
knows its rows; when the last part has arrived the kernels lay the matrix out for the device. A layer is told once, when
the model is built, which norms stand around it and which weight is read behind its own: kernels may fuse them. Each
rank loads its shards of the parts alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from mini_sglang.kernels.interface import Matrix, Norm, Residual
from mini_sglang.layers.norm import NO_NORMS, BlockNorms
from mini_sglang.layers.placement import Placement
from mini_sglang.parallel.sharding import Shard, whole
from mini_sglang.weights.quantized_weight import QuantizedWeight
from mini_sglang.weights.tensor import CheckpointTensor, WeightSlot


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
        self._inputs = _as_shard(in_features)
        self._parts = {name: _as_shard(rows) for name, rows in parts.items()}
        self.in_features = self._inputs.size
        self._spans: dict[str, slice] = {}  # the rows of each part
        self.out_features = 0
        for name, rows in self._parts.items():
            self._spans[name] = slice(self.out_features, self.out_features + rows.size)
            self.out_features += rows.size
        self._placement = placement
        self._summed = summed
        self._quantize = placement.quantize if quantized else None
        self._norms, self._prefetched = norms, prefetched
        self._weight: torch.Tensor | None = None  # [out, in]; here only until it is laid out
        self._quantized: dict[str, QuantizedWeight] = {}  # likewise, the parts that are kept as they are stored
        self._bias: torch.Tensor | None = None
        if bias:
            self._bias = torch.empty(self.out_features, dtype=placement.dtype, device=placement.device)
        self._missing = set(parts) | ({f"{name}.bias" for name in parts} if bias else set())
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
        assert self._laid_out is not None, f"weights that never arrived: {sorted(self._missing)}"
        return self._laid_out

    def weight_slots(self, prefix: str) -> dict[str, WeightSlot]:
        """The checkpoint tensors that fill this layer; `prefix` is the path of the module that holds the parts."""
        slots: dict[str, WeightSlot] = {}
        for name, rows in self._parts.items():
            path = f"{prefix}.{name}" if prefix else name
            slots[f"{path}.weight"] = WeightSlot((rows.full, self._inputs.full), self._weight_loader(name))
            if self._bias is not None:
                slots[f"{path}.bias"] = WeightSlot((rows.full,), self._bias_loader(name))
        return slots

    def _weight_loader(self, name: str) -> Callable[[CheckpointTensor], None]:
        def load(tensor: CheckpointTensor) -> None:
            stored = tensor.quantized() if self._placement.packed else None
            if stored is None and self._quantize is not None:
                stored = self._quantize(tensor.dense().to(self._placement.device))
            part = None if stored is None else stored.shard(self._parts[name], self._inputs)
            if part is not None:
                self._quantized[name] = part.to(self._placement.device)
            else:
                tensor.copy_to(self._rows(name), self._parts[name], self._inputs)
            self._arrived(name)

        return load

    def _bias_loader(self, name: str) -> Callable[[CheckpointTensor], None]:
        def load(tensor: CheckpointTensor) -> None:
            assert self._bias is not None
            tensor.copy_to(self._bias[self._spans[name]], self._parts[name])
            self._arrived(f"{name}.bias")

        return load

    def _rows(self, part: str) -> torch.Tensor:
        """A part's rows of the dense weight."""
        if self._weight is None:
            shape = (self.out_features, self.in_features)
            self._weight = torch.empty(shape, dtype=self._placement.dtype, device=self._placement.device)
        return self._weight[self._spans[part]]

    def _arrived(self, part: str) -> None:
        self._missing.discard(part)
        if not self._missing:
            self._lay_out()

    def _lay_out(self) -> None:
        if self._summed and self._placement.parallel.rank > 0:
            self._bias = None  # added once, by the first rank
        self._laid_out = self._quantized_matrix()
        if self._laid_out is None:
            for name, part in self._quantized.items():
                self._rows(name).copy_(part.dense())
            assert self._weight is not None
            self._laid_out = self._placement.kernels.matrix(self._weight, self._bias)
        self._weight = None
        self._quantized.clear()

    def _quantized_matrix(self) -> Matrix | None:
        """The matrix of parts that are all stored alike, if the device has a kernel for it."""
        parts = [self._quantized[name] for name in self._parts if name in self._quantized]
        is_whole = len(parts) == len(self._parts) and all(part.fits(parts[0]) for part in parts)
        if not is_whole or not self._placement.packed:
            return None
        return self._placement.kernels.quantized_matrix(QuantizedWeight.stacked(parts), self._bias)


def _as_shard(size: int | Shard) -> Shard:
    return whole(size) if isinstance(size, int) else size
