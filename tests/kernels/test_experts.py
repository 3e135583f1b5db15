"""The experts of every device compute what a loop over tokens in float64 does; no token is lost in any routing."""

from __future__ import annotations

import pytest
import torch

from mini_sglang.kernels.base import Kernels, TorchKernels
from mini_sglang.kernels.cpu_kernels import CpuKernels
from mini_sglang.kernels.triton_kernels import TritonKernels

FP32, BF16 = torch.float32, torch.bfloat16
EXPERTS, HIDDEN, SIZE = 6, 32, 16
SUBJECTS = {
    "torch": (TorchKernels(), FP32),
    "torch bfloat16": (TorchKernels(), BF16),
    "cpu": (CpuKernels(FP32), FP32),
    "cpu bfloat16": (CpuKernels(BF16), BF16),
    "triton": (TritonKernels(), FP32),
    "triton, deterministic": (TritonKernels(deterministic=True), FP32),
}


def exact(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """Token by token and expert by expert, in float64."""
    sums = []
    for token, chosen, shares in zip(x.double(), ids.tolist(), weights.double(), strict=True):
        total = torch.zeros_like(token)
        for expert, share in zip(chosen, shares, strict=True):
            gate, up = (gate_up[expert].double() @ token).chunk(2)
            total += share * (down[expert].double() @ (gate * gate.sigmoid() * up))
        sums.append(total)
    return torch.stack(sums)


def make_weights(dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    gate_up, down = torch.randn(EXPERTS, 2 * SIZE, HIDDEN), torch.randn(EXPERTS, HIDDEN, SIZE)
    return (gate_up / HIDDEN**0.5).to(device, dtype), (down / SIZE**0.5).to(device, dtype)


@pytest.mark.parametrize(("kernels", "dtype"), SUBJECTS.values(), ids=SUBJECTS)
@pytest.mark.parametrize("rows", [1, 2, 17, 64])
@pytest.mark.parametrize("chosen", [EXPERTS, 2], ids=["all experts", "two experts"])
def test_equal_float64(kernels: Kernels, dtype: torch.dtype, rows: int, chosen: int, device: torch.device) -> None:
    """With two experts to choose from, every row meets in both, and the others are touched by none."""
    device = device if isinstance(kernels, TritonKernels) else torch.device("cpu")
    gate_up, down = make_weights(dtype, device)
    x, residual = (torch.randn(rows, HIDDEN).to(device, dtype) for _ in range(2))
    ids = torch.stack([torch.randperm(chosen)[:2] for _ in range(rows)]).to(device)
    weights = torch.rand(rows, 2, device=device)
    wanted = residual.double() + exact(x, ids, weights, gate_up, down)
    out = kernels.experts(gate_up, down).add_to(residual.clone(), x, ids, weights)
    assert out.dtype == dtype
    tolerance = 1e-2 if dtype == BF16 else 2e-6
    assert ((out.double() - wanted).norm(dim=1) / wanted.norm(dim=1)).max() < tolerance


def test_no_rows_are_fine() -> None:
    """A step of chunks that sample nothing has none behind the last layer's attention."""
    empty = torch.empty(0, HIDDEN)
    experts = TorchKernels().experts(*make_weights(FP32, torch.device("cpu")))
    out = experts.add_to(empty, empty, torch.empty(0, 2, dtype=torch.int64), torch.empty(0, 2))
    assert out.shape == (0, HIDDEN)
