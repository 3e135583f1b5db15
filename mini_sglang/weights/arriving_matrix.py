"""A matrix whose parts arrive one by one from a checkpoint: kept as they are stored, or dense. Knows no layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch

from mini_sglang.parallel.sharding import Shard
from mini_sglang.weights.quantized_weight import QuantizedWeight
from mini_sglang.weights.tensor import CheckpointTensor, WeightSlot


class ArrivingMatrix:
    """This rank's W [out, in], stacked from `parts`: part name -> its output rows, in order; and perhaps a bias.

    With `packed`, parts that are quantised stay as they are stored. `quantize`, if given, makes such of dense ones.
    """

    def __init__(
        self,
        parts: Mapping[str, Shard],
        inputs: Shard,
        device: torch.device,
        dtype: torch.dtype,
        *,
        bias: bool,
        packed: bool,
        quantize: Callable[[torch.Tensor], QuantizedWeight] | None,
    ) -> None:
        self._parts, self.inputs = parts, inputs
        self._device, self._dtype = device, dtype
        self._packed, self._quantize = packed, quantize
        self._spans: dict[str, slice] = {}  # the rows of each part
        self.out_features = 0
        for name, rows in parts.items():
            self._spans[name] = slice(self.out_features, self.out_features + rows.size)
            self.out_features += rows.size
        self._quantized: dict[str, QuantizedWeight] = {}
        self._weight: torch.Tensor | None = None  # [out, in]; made when the first dense part arrives
        self.bias = torch.empty(self.out_features, dtype=dtype, device=device) if bias else None
        self.missing = {f"{name}.weight" for name in parts} | {f"{name}.bias" for name in parts if bias}

    def slots(self, prefix: str, arrived: Callable[[], None]) -> dict[str, WeightSlot]:
        """The checkpoint tensors that fill it, below the path `prefix`; `arrived` is called when all are there."""
        slots: dict[str, WeightSlot] = {}
        for name, rows in self._parts.items():
            path = f"{prefix}.{name}" if prefix else name
            load = partial(self._load, name, arrived)
            slots[f"{path}.weight"] = WeightSlot((rows.full, self.inputs.full), load)
            if self.bias is not None:
                slots[f"{path}.bias"] = WeightSlot((rows.full,), partial(self._load_bias, name, arrived))
        return slots

    def stored(self) -> QuantizedWeight | None:
        """The whole matrix as it is stored; None if its parts are not all quantised alike."""
        parts = [self._quantized[name] for name in self._parts if name in self._quantized]
        if len(parts) < len(self._parts) or not all(part.fits(parts[0]) for part in parts):
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
        self._weight = self.bias = None
        self._quantized.clear()

    def _load(self, name: str, arrived: Callable[[], None], tensor: CheckpointTensor) -> None:
        stored = tensor.quantized() if self._packed else None
        if stored is None and self._quantize is not None:
            stored = self._quantize(tensor.dense().to(self._device))
        share = None if stored is None else stored.shard(self._parts[name], self.inputs)
        if share is None:
            tensor.copy_to(self._rows(name), self._parts[name], self.inputs)
        elif self._packed:
            self._quantized[name] = share.to(self._device)
        else:
            self._rows(name).copy_(share.dense())
        self._arrive(f"{name}.weight", arrived)

    def _load_bias(self, name: str, arrived: Callable[[], None], tensor: CheckpointTensor) -> None:
        assert self.bias is not None
        tensor.copy_to(self.bias[self._spans[name]], self._parts[name])
        self._arrive(f"{name}.bias", arrived)

    def _arrive(self, name: str, arrived: Callable[[], None]) -> None:
        self.missing.discard(name)
        if not self.missing:
            arrived()

    def _rows(self, part: str) -> torch.Tensor:
        if self._weight is None:
            shape = (self.out_features, self.inputs.size)
            self._weight = torch.empty(shape, dtype=self._dtype, device=self._device)
        return self._weight[self._spans[part]]
