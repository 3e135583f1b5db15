"""Where a model's weights live and in which form: handed to every layer when the model is built."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mini_sglang.kernels.interface import Kernels
from mini_sglang.parallel.tensor_parallel import SINGLE, TensorParallel


@dataclass(frozen=True)
class Placement:
    """Device and dtype of weights and activations, and the kernels for what lies between matmuls.

    `packed` leaves quantised matrices as they are stored, where the device has a kernel. `parallel` says which part of
    the model this rank holds.
    """

    device: torch.device
    dtype: torch.dtype
    kernels: Kernels
    packed: bool = False
    parallel: TensorParallel = SINGLE
