"""What tests of layers load: tensors as a checkpoint stores them, on each of several ranks."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch.distributed import FileStore  # type: ignore[attr-defined]

from mini_sglang.parallel.tensor_parallel import SINGLE, TensorParallel, connect_cpus
from mini_sglang.weights.quantized_weight import QuantizedWeight
from mini_sglang.weights.tensor import CheckpointTensor


def tensor(name: str, stored: QuantizedWeight | torch.Tensor) -> CheckpointTensor:
    if isinstance(stored, torch.Tensor):
        return CheckpointTensor(name, tuple(stored.shape), lambda: stored)
    return CheckpointTensor(name, tuple(stored.q.shape), stored.dense, lambda: stored)


def on_ranks(number: int, store: Path, work: Callable[[TensorParallel], torch.Tensor]) -> list[torch.Tensor]:
    if number == 1:
        return [work(SINGLE)]
    with ThreadPoolExecutor(number) as pool:

        def one(rank: int) -> torch.Tensor:
            return work(connect_cpus(FileStore(str(store), number), rank, number, "127.0.0.1"))

        return list(pool.map(one, range(number)))
