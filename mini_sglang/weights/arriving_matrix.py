"""A matrix whose parts arrive one by one from a checkpoint: kept as they are stored, or dense. Knows no layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from mini_sglang.parallel.sharding import Shard
from mini_sglang.weights.quantized_weight import QuantizedWeight
from mini_sglang.weights.tensor import CheckpointTensor


class ArrivingMatrix:
    """This rank's W [out, in], stacked from `parts`: part name -> its output rows, in order.

    With `packed`, parts that are quantised stay as they are stored. `quantize`, if given, makes such of dense ones.
    """

    def __init__(
        self,
        parts: Mapping[str, Shard],
        inputs: Shard,
        device: torch.device,
        dtype: torch.dtype,
        *,
        packed: bool,
        quantize: Callable[[torch.Tensor], QuantizedWeight] | None,
    ) -> None:
        self.parts, self.inputs = parts, inputs
        self._device, self._dtype = device, dtype
        self._packed, self._quantize = packed, quantize
        self.spans: dict[str, slice] = {}  # the rows of each part
        self.out_features = 0
        for name, rows in parts.items():
            self.spans[name] = slice(self.out_features, self.out_features + rows.size)
            self.out_features += rows.size
        self._quantized: dict[str, QuantizedWeight] = {}
        self._weight: torch.Tensor | None = None  # [out, in]; made when the first dense part arrives
        self.missing = set(parts)

    def load(self, name: str, tensor: CheckpointTensor) -> None:
        """Take this rank's share of a part."""
        stored = tensor.quantized() if self._packed else None
        if stored is None and self._quantize is not None:
            stored = self._quantize(tensor.dense().to(self._device))
        share = None if stored is None else stored.shard(self.parts[name], self.inputs)
        if share is None:
            tensor.copy_to(self._rows(name), self.parts[name], self.inputs)
        elif self._packed:
            self._quantized[name] = share.to(self._device)
        else:
            self._rows(name).copy_(share.dense())
        self.missing.discard(name)

    def stored(self) -> QuantizedWeight | None:
        """The whole matrix as it is stored; None if its parts are not all quantised alike."""
        parts = [self._quantized[name] for name in self.parts if name in self._quantized]
        if len(parts) < len(self.parts) or not all(part.fits(parts[0]) for part in parts):
            return None
        return QuantizedWeight.stacked(parts)

    def dense(self) -> torch.Tensor:
        """The whole matrix [out, in], dequantised part by part."""
        for name, part in self._quantized.items():
            self._rows(name).copy_(part.dense())
        assert self._weight is not None, f"weights that never arrived: {sorted(self.missing)}"
        return self._weight

    def release(self) -> None:
        """Forget what arrived: it has been laid out."""
        self._weight = None
        self._quantized.clear()

    def _rows(self, part: str) -> torch.Tensor:
        if self._weight is None:
            shape = (self.out_features, self.inputs.size)
            self._weight = torch.empty(shape, dtype=self._dtype, device=self._device)
        return self._weight[self.spans[part]]
