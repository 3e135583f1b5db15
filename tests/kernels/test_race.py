"""The race on the device picks the token that its PyTorch twin and the sampler pick."""

from __future__ import annotations

import pytest
import torch

from mini_sglang.execution.sampler import SamplingBatch, sample
from mini_sglang.kernels.race import race, race_reference
from mini_sglang.request import SamplingParams

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("vocab", [50, 2048, 40_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_same_tokens_as_the_twin_and_the_sampler(vocab: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    rows = 9
    logits = (torch.randn(rows, vocab, device=DEVICE) * 2).to(dtype)
    temperatures = torch.tensor([0.0, 0.6, 1.0, 2.0, 0.0, 1.0, 1.0, 0.1, 5.0], device=DEVICE)
    seeds = torch.tensor([0, 1, -5, 2**62, 7, -(2**63), 2**63 - 1, 3, 4], device=DEVICE)
    positions = torch.tensor([1, 2, 3, 100_000, 5, 6, 7, 8, 9], device=DEVICE)
    tokens = race(logits, temperatures, seeds, positions)
    assert tokens.tolist() == race_reference(logits, temperatures, seeds, positions).tolist()
    batch = SamplingBatch(
        params=[SamplingParams(temperature=value) for value in temperatures.tolist()],
        seeds=seeds.tolist(),
        positions=positions.tolist(),
        prompt_lengths=[1] * rows,
        history=lambda row: torch.zeros(1, dtype=torch.int32),
    )
    temperature_rounding = [i for i in range(rows) if temperatures[i].item() not in (0.6, 0.1)]
    assert tokens[temperature_rounding].tolist() == sample(logits, batch)[temperature_rounding].tolist()


def test_frequencies_follow_the_distribution_down_to_the_tail() -> None:
    rows = 3000
    logits = torch.tensor([0.6, 0.25, 0.1, 0.05]).log().to(DEVICE).expand(rows, -1).contiguous()
    seeds, positions = torch.zeros(rows, dtype=torch.int64), torch.arange(rows)
    # the twin: in the interpreter so many rows would take minutes
    draw = race if DEVICE.type == "cuda" else race_reference
    tokens = draw(logits, torch.ones(rows, device=DEVICE), seeds.to(DEVICE), positions.to(DEVICE))
    shares = torch.bincount(tokens.cpu(), minlength=4) / rows
    torch.testing.assert_close(shares, torch.tensor([0.6, 0.25, 0.1, 0.05]), atol=0.03, rtol=0)
