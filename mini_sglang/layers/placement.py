"""Where a model's weights live and in which form: handed to every layer when the model is built."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from mini_sglang.kernels.interface import Kernels
from mini_sglang.parallel.sharding import Shard
from mini_sglang.parallel.tensor_parallel import SINGLE, TensorParallel
from mini_sglang.weights.arriving_matrix import ArrivingMatrix
from mini_sglang.weights.quantized_weight import QuantizedWeight


@dataclass(frozen=True)
class Placement:
    """Device and dtype of weights and activations, and the kernels for what lies between matmuls.

    `packed` keeps quantised matrices as they are, where the device has kernels for them. `quantize`, if given, makes
    such matrices of dense ones. `parallel` says which part of the model this rank holds.
    """

    device: torch.device
    dtype: torch.dtype
    kernels: Kernels
    packed: bool = False
    quantize: Callable[[torch.Tensor], QuantizedWeight] | None = None
    parallel: TensorParallel = SINGLE

    def arriving(
        self, parts: Mapping[str, Shard], inputs: Shard, *, bias: bool = False, quantized: bool = True
    ) -> ArrivingMatrix:
        """A matrix of `parts` (name -> output rows) yet to be loaded; dense ones stay so unless `quantized`."""
        quantize = self.quantize if quantized else None
        return ArrivingMatrix(parts, inputs, self.device, self.dtype, bias=bias, packed=self.packed, quantize=quantize)
