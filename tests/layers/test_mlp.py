"""The gated MLP with its norm before or behind it, on one rank and shared by two."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.distributed import FileStore  # type: ignore[attr-defined]

from mini_sglang.kernels.interface import Residual
from mini_sglang.kernels.torch_kernels import TorchKernels
from mini_sglang.layers.mlp import GatedMLP
from mini_sglang.layers.norm import BlockNorms, RMSNorm
from mini_sglang.layers.placement import Placement
from mini_sglang.model_config import ModelConfig
from mini_sglang.parallel.tensor_parallel import SINGLE, TensorParallel, connect_cpus
from mini_sglang.weights.dummy import dummy_tensor
from mini_sglang.weights.tensor import CheckpointTensor

CPU = torch.device("cpu")
CONFIG = ModelConfig(
    architecture="olmo2",
    vocab_size=8,
    hidden_size=32,
    intermediate_size=96,
    num_layers=1,
    num_heads=2,
    num_kv_heads=2,
    head_dim=16,
    context_length=16,
    rms_norm_eps=1e-5,
    rope_theta=1e4,
    mlp_bias=True,
)
X = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))


def tensor(name: str, *shape: int) -> CheckpointTensor:
    return dummy_tensor(name, shape, 0, CPU)


def computed(parallel: TensorParallel, post_norm: bool) -> torch.Tensor:
    placement = Placement(CPU, torch.float32, TorchKernels(), parallel=parallel)
    norm = RMSNorm(32, 1e-5, placement)
    mlp = GatedMLP(CONFIG, placement, 0, BlockNorms(after=norm) if post_norm else BlockNorms(before=norm))
    for name, slot in {**mlp.weight_slots("mlp"), "norm.weight": norm.weight_slot()}.items():
        slot.load(tensor(name, *slot.shape))
    return mlp(Residual(X.clone())).x


def defined(post_norm: bool) -> torch.Tensor:
    def linear(x: torch.Tensor, name: str, rows: int, columns: int) -> torch.Tensor:
        weight, bias = tensor(f"mlp.{name}.weight", rows, columns), tensor(f"mlp.{name}.bias", rows)
        return F.linear(x, weight.dense(), bias.dense())

    def mlp(x: torch.Tensor) -> torch.Tensor:
        return linear(F.silu(linear(x, "gate_proj", 96, 32)) * linear(x, "up_proj", 96, 32), "down_proj", 32, 96)

    def norm(x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (32,), tensor("norm.weight", 32).dense(), 1e-5)

    return X + (norm(mlp(X)) if post_norm else mlp(norm(X)))


@pytest.mark.parametrize("post_norm", [False, True])
def test_one_rank(post_norm: bool) -> None:
    torch.testing.assert_close(computed(SINGLE, post_norm), defined(post_norm))


@pytest.mark.parametrize("post_norm", [False, True])
def test_two_ranks(tmp_path: Path, post_norm: bool) -> None:
    def on(rank: int) -> torch.Tensor:
        return computed(connect_cpus(FileStore(str(tmp_path / "store"), 2), rank, 2, "127.0.0.1"), post_norm)

    with ThreadPoolExecutor(2) as pool:
        for result in pool.map(on, range(2)):
            torch.testing.assert_close(result, defined(post_norm))
