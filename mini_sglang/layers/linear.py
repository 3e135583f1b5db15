"""Linear layers: one matrix product over weights that may arrive as several checkpoint tensors.

q, k and v (and the MLP's gate and up) are stacked into one matrix, so that a step reads them in one product. Each part
knows its rows; when the last part has arrived the matrix is laid out for the device, and the dense copy is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F

from mini_sglang.kernels.cpu_linear import Int4Matrix, PrepackedMatrix
from mini_sglang.layers.placement import Placement
from mini_sglang.weights.tensor import CheckpointTensor, QuantizedBlocks, WeightSlot

_MAX_PACKED_ROWS = 2  # beyond it the dense product is faster than unpacking 4-bit blocks for every row


class Linear:
    """y = x W^T + bias, W [out, in] stacked from `parts`: part name -> its output rows, in order."""

    def __init__(self, in_features: int, parts: Mapping[str, int], placement: Placement, *, bias: bool = False) -> None:
        self.in_features = in_features
        self.out_features = sum(parts.values())
        self._parts = dict(parts)
        self._placement = placement
        self._weight: torch.Tensor | None = None  # [out, in]; on a CPU only until it is laid out
        self._bias: torch.Tensor | None = None
        if bias:
            self._bias = torch.empty(self.out_features, dtype=placement.dtype, device=placement.device)
        self._blocks: dict[str, QuantizedBlocks] = {}
        self._missing = set(parts) | ({f"{name}.bias" for name in parts} if bias else set())
        self._prepacked: PrepackedMatrix | None = None
        self._int4: Int4Matrix | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, in] -> [rows, out]"""
        if self._int4 is not None and x.shape[0] <= _MAX_PACKED_ROWS:
            return self._int4.multiply(x)
        if self._prepacked is not None:
            return self._prepacked.multiply(x)
        assert self._weight is not None
        return F.linear(x, self._weight, self._bias)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """residual [rows, out] + the product of x [rows, in] -> [rows, out]; may overwrite `residual`"""
        if self._prepacked is not None and (self._int4 is None or x.shape[0] > _MAX_PACKED_ROWS):
            return self._prepacked.multiply_add(x, residual)
        if self._weight is not None and self._bias is None and self._weight.is_cuda:
            return residual.addmm_(x, self._weight.t())  # the product is added where it is made
        return residual + self(x)

    def weight_slots(self, prefix: str) -> dict[str, WeightSlot]:
        """The checkpoint tensors that fill this layer; `prefix` is the path of the module that holds the parts."""
        slots: dict[str, WeightSlot] = {}
        first = 0
        for name, rows in self._parts.items():
            span = slice(first, first + rows)
            path = f"{prefix}.{name}" if prefix else name
            slots[f"{path}.weight"] = WeightSlot((rows, self.in_features), self._weight_loader(name, span))
            if self._bias is not None:
                slots[f"{path}.bias"] = WeightSlot((rows,), self._bias_loader(name, span))
            first += rows
        return slots

    def _weight_loader(self, name: str, span: slice) -> Callable[[CheckpointTensor], None]:
        def load(tensor: CheckpointTensor) -> None:
            if self._weight is None:
                shape = (self.out_features, self.in_features)
                self._weight = torch.empty(shape, dtype=self._placement.dtype, device=self._placement.device)
            blocks = tensor.blocks() if self._placement.packed else None
            if blocks is not None:
                self._blocks[name] = blocks
            self._weight[span].copy_(tensor.dense())
            self._arrived(name)

        return load

    def _bias_loader(self, name: str, span: slice) -> Callable[[CheckpointTensor], None]:
        def load(tensor: CheckpointTensor) -> None:
            assert self._bias is not None
            self._bias[span].copy_(tensor.dense())
            self._arrived(f"{name}.bias")

        return load

    def _arrived(self, part: str) -> None:
        self._missing.discard(part)
        if not self._missing:
            self._lay_out()

    def _lay_out(self) -> None:
        assert self._weight is not None
        if self._placement.device.type != "cpu" or not PrepackedMatrix.available():
            return
        if len(self._blocks) == len(self._parts):
            blocks = _stack([self._blocks[name] for name in self._parts])
            if Int4Matrix.supports(blocks):
                self._int4 = Int4Matrix(blocks, self._bias)
        self._prepacked = PrepackedMatrix(self._weight, self._bias)
        self._weight = None
        self._blocks.clear()


def _stack(blocks: list[QuantizedBlocks]) -> QuantizedBlocks:
    """The parts' blocks as one matrix: groups run along the input, so rows simply follow each other."""
    return QuantizedBlocks(
        q=torch.cat([part.q for part in blocks]),
        scale=torch.cat([part.scale for part in blocks]),
        minimum=torch.cat([part.minimum for part in blocks]),
        group_size=blocks[0].group_size,
    )
