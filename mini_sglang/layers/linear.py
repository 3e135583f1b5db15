"""Linear layers: one matrix product over weights that may arrive as several checkpoint tensors.

q, k and v (and the MLP's gate and up) are stacked into one matrix, so that a step reads them in one product. Each part
knows its rows; when the last part has arrived the matrix is laid out for the device, and the dense copy is dropped.
Each rank loads its shards of the parts alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from mini_sglang.kernels.cpu.linear import CpuMatrix
from mini_sglang.kernels.interface import Matrix, Residual
from mini_sglang.layers.norm import RMSNorm
from mini_sglang.layers.placement import Placement
from mini_sglang.parallel.sharding import Shard, copy_shard, whole
from mini_sglang.weights.tensor import CheckpointTensor, QuantizedBlocks, WeightSlot


class Linear:
    """y = x W^T + bias, W [out, in] stacked from `parts`: part name -> its output rows, in order.

    Sizes that are numbers are whole on every rank. A column-parallel layer has shards for parts: each rank computes
    some outputs. A row-parallel one has a shard of inputs and is `summed`: `add_to` adds the ranks' products up.
    """

    def __init__(
        self,
        in_features: int | Shard,
        parts: Mapping[str, int | Shard],
        placement: Placement,
        *,
        bias: bool = False,
        summed: bool = False,
    ) -> None:
        self._inputs = _as_shard(in_features)
        self._parts = {name: _as_shard(rows) for name, rows in parts.items()}
        self.in_features = self._inputs.size
        self.out_features = sum(rows.size for rows in self._parts.values())
        self._placement = placement
        self._summed = summed
        self._weight: torch.Tensor | None = None  # [out, in]; here only until it is laid out
        self._bias: torch.Tensor | None = None
        if bias:
            self._bias = torch.empty(self.out_features, dtype=placement.dtype, device=placement.device)
        self._blocks: dict[str, QuantizedBlocks] = {}
        self._missing = set(parts) | ({f"{name}.bias" for name in parts} if bias else set())
        self._laid_out: Matrix | None = None

    def __call__(self, x: torch.Tensor, norm: RMSNorm | None = None, out: torch.Tensor | None = None) -> torch.Tensor:
        """The product of x [rows, in], or of its norm -> [rows, out], in `out` (contiguous) where that is given"""
        return self._matrix.matmul(x, None if norm is None else norm.parameters, out)

    @property
    def weight(self) -> torch.Tensor | None:
        """[out, in] as a device reads it, for who may begin to fetch it; None where it was laid out in another way"""
        return self._matrix.weight

    def gated(self, x: torch.Tensor, norm: RMSNorm | None, prefetch: torch.Tensor | None) -> torch.Tensor:
        """silu(first half) * second half of the product of x, or of its norm. x [rows, in] -> [rows, out / 2]

        `prefetch` is the weight that is needed next: a device may begin to fetch it.
        """
        return self._matrix.gated(x, None if norm is None else norm.parameters, prefetch)

    def add_to(
        self, residual: torch.Tensor, x: torch.Tensor, norm: RMSNorm | None = None, then: RMSNorm | None = None
    ) -> Residual:
        """residual [rows, out] + the product of x [rows, in], or + its norm -> [rows, out]; may overwrite `residual`

        If `summed`, the product of all ranks' x, whose sum the residual is added to; the first rank adds the bias.
        `then` is the norm that reads the sum, which a device may compute along the way.
        """
        parallel = self._placement.parallel
        if norm is not None:
            product = self._matrix.matmul(x)
            product = parallel.all_reduce(product) if self._summed else product
            return Residual(residual + self._placement.kernels.rms_norm(product, norm.weight, norm.eps))
        if not self._summed or parallel.size == 1:
            return self._matrix.add_to(residual, x, None if then is None else then.parameters)
        return Residual(parallel.all_reduce(self._matrix.matmul(x), residual))

    @property
    def _matrix(self) -> Matrix:
        assert self._laid_out is not None, f"weights that never arrived: {sorted(self._missing)}"
        return self._laid_out

    def weight_slots(self, prefix: str) -> dict[str, WeightSlot]:
        """The checkpoint tensors that fill this layer; `prefix` is the path of the module that holds the parts."""
        slots: dict[str, WeightSlot] = {}
        first = 0
        for name, rows in self._parts.items():
            span = slice(first, first + rows.size)
            path = f"{prefix}.{name}" if prefix else name
            slots[f"{path}.weight"] = WeightSlot((rows.full, self._inputs.full), self._weight_loader(name, span))
            if self._bias is not None:
                slots[f"{path}.bias"] = WeightSlot((rows.full,), self._bias_loader(name, span))
            first += rows.size
        return slots

    def _weight_loader(self, name: str, span: slice) -> Callable[[CheckpointTensor], None]:
        def load(tensor: CheckpointTensor) -> None:
            if self._weight is None:
                shape = (self.out_features, self.in_features)
                self._weight = torch.empty(shape, dtype=self._placement.dtype, device=self._placement.device)
            blocks = tensor.blocks() if self._placement.packed else None
            if blocks is not None:
                self._blocks[name] = blocks
            copy_shard(self._weight[span], tensor.dense(), self._parts[name], self._inputs)
            self._arrived(name)

        return load

    def _bias_loader(self, name: str, span: slice) -> Callable[[CheckpointTensor], None]:
        def load(tensor: CheckpointTensor) -> None:
            assert self._bias is not None
            copy_shard(self._bias[span], tensor.dense(), self._parts[name])
            self._arrived(f"{name}.bias")

        return load

    def _arrived(self, part: str) -> None:
        self._missing.discard(part)
        if not self._missing:
            self._lay_out()

    def _lay_out(self) -> None:
        assert self._weight is not None
        if self._summed and self._placement.parallel.rank > 0:
            self._bias = None  # added once, by the first rank
        if self._placement.device.type == "cpu" and CpuMatrix.available(self._placement.dtype):
            blocks = [self._blocks[name] for name in self._parts if name in self._blocks]
            stacked = _stack(blocks) if len(blocks) == len(self._parts) else None
            self._laid_out = CpuMatrix(self._placement.kernels, self._weight, self._bias, stacked)
        else:
            self._laid_out = self._placement.kernels.matrix(self._weight, self._bias)
        self._weight = None
        self._blocks.clear()


def _as_shard(size: int | Shard) -> Shard:
    return whole(size) if isinstance(size, int) else size


def _stack(blocks: list[QuantizedBlocks]) -> QuantizedBlocks:
    """The parts' blocks as one matrix: groups run along the input, so rows simply follow each other."""
    return QuantizedBlocks(
        q=torch.cat([part.q for part in blocks]),
        scale=torch.cat([part.scale for part in blocks]),
        minimum=torch.cat([part.minimum for part in blocks]),
        group_size=blocks[0].group_size,
    )
