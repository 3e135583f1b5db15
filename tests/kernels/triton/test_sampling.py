"""The device draws the tokens that `sampler.sample` defines, for every combination of penalties and filters."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mini_sglang.execution.device_sampler import DeviceSampler
from mini_sglang.execution.request_table import RequestTable
from mini_sglang.execution.sampler import SamplingBatch, sample
from mini_sglang.sampling_params import SamplingParams
from mini_sglang.scheduling.batch import NewRequest, ScheduledBatch

# The interpreter computes with NumPy, which speaks up where -inf is meant.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PROMPT_LENGTH = 2
KINDS = [
    SamplingParams(temperature=0),
    SamplingParams(),
    SamplingParams(temperature=0.3),
    SamplingParams(top_k=1, temperature=3),
    SamplingParams(top_k=20),
    SamplingParams(top_k=30, temperature=60),
    SamplingParams(top_p=0.3),
    SamplingParams(top_p=0.95, temperature=1.4),
    SamplingParams(top_p=0.6, temperature=80),
    SamplingParams(min_p=0.2),
    SamplingParams(min_p=0.9, temperature=5),
    SamplingParams(top_k=12, top_p=0.5),
    SamplingParams(top_k=300, top_p=0.9, temperature=4),
    SamplingParams(top_k=40, top_p=0.9, min_p=0.05, temperature=2),
    SamplingParams(repetition_penalty=1.3, temperature=0),
    SamplingParams(repetition_penalty=0.7, presence_penalty=0.5, top_p=0.8),
    SamplingParams(frequency_penalty=-0.7, top_k=9),
    SamplingParams(presence_penalty=-2, frequency_penalty=1.5, min_p=0.1, top_k=200, top_p=0.7),
    SamplingParams(temperature=0, top_k=5, top_p=0.1, min_p=0.9),
]


@dataclasses.dataclass
class Draws:
    """Draws on the device of `params`, one row each, beside those of the definition."""

    params: list[SamplingParams]
    seeds: list[int]
    history: list[list[int]]

    def __post_init__(self) -> None:
        self.rows = len(self.params)
        self.positions = [len(tokens) for tokens in self.history]

    def on_device(self, logits: torch.Tensor) -> list[int]:
        table = RequestTable(self.rows, max(self.positions), page_size=1, device=DEVICE, idle_page=0)
        sampler = DeviceSampler(table, logits.shape[1])
        slots = random.Random(0).sample(range(self.rows), self.rows)
        placed = zip(slots, self.history, self.params, self.seeds, strict=True)
        new_requests = [NewRequest(slot, tokens, PROMPT_LENGTH, params, seed) for slot, tokens, params, seed in placed]
        table.take(new_requests)
        sampler.take(ScheduledBatch(0, [], new_requests, [], []))
        positions = torch.tensor(self.positions, dtype=torch.int32, device=DEVICE)
        token_ids = sampler.draw(logits.to(DEVICE), torch.tensor(slots, device=DEVICE), positions)
        assert table.tokens[slots, self.positions].tolist() == token_ids.tolist()
        assert table.num_computed[slots].tolist() == self.positions
        return token_ids.tolist()

    def defined(self, logits: torch.Tensor) -> list[int]:
        return sample(
            logits,
            SamplingBatch(
                params=self.params,
                seeds=self.seeds,
                positions=self.positions,
                prompt_lengths=[PROMPT_LENGTH] * self.rows,
                history=lambda row: torch.tensor(self.history[row], dtype=torch.int32, device=logits.device),
            ),
        ).tolist()


def draws_of(params: list[SamplingParams], vocab: int, seed: int = 0) -> Draws:
    """Seeds of all sizes, and histories of 2 to 30 tokens that repeat."""
    rng = random.Random(seed)
    few = [rng.randrange(vocab) for _ in range(12)]
    return Draws(
        params,
        [rng.choice([rng.randrange(100), rng.randrange(-(2**63), 2**63)]) for _ in params],
        [rng.choices(few, k=rng.randint(2, 30)) for _ in params],
    )


def counts_of(logits: torch.Tensor, params: SamplingParams, count: int) -> Counter[int]:
    """Token frequencies of `count` draws by the device."""
    same = Draws([params] * count, list(range(count)), [[0, 0]] * count)
    return Counter(same.on_device(logits.expand(count, -1)))


@pytest.mark.parametrize(
    ("vocab", "dtype"), [(1, torch.float32), (500, torch.float16), (2048, torch.float32), (5001, torch.float16)]
)
def test_every_kind_of_row_draws_the_defined_token(vocab: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(vocab)
    logits = (torch.randn(len(KINDS), vocab, generator=generator) * 3).to(dtype)
    before = logits.clone()
    draws = draws_of(KINDS, vocab, seed=vocab)
    assert draws.on_device(logits) == draws.defined(logits)
    assert torch.equal(logits, before)


PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0, 1e-6, 0.2, 0.7, 1.0, 3.0, 100.0]),
    top_k=st.sampled_from([0, -1, 1, 2, 7, 40, 200, 10**6]),
    top_p=st.sampled_from([1e-9, 0.1, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0, 1e-6, 0.03, 0.5, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 0.5, 1.7]),
    presence_penalty=st.sampled_from([0, 0, -1.5, 0.3]),
    frequency_penalty=st.sampled_from([0, 0, -0.25, 2]),
)


@settings(max_examples=20, deadline=None)
@given(st.lists(PARAMS, min_size=1, max_size=4), st.integers(1, 400), st.sampled_from([None, 1, 0.25]), st.integers())
def test_any_parameters_and_any_ties_draw_the_defined_token(
    params: list[SamplingParams], vocab: int, grid: float | None, seed: int
) -> None:
    logits = torch.randn(len(params), vocab, generator=torch.Generator().manual_seed(seed % 2**63)) * 2
    if grid is not None:  # many equal logits, so that filters cut through ties
        logits = (logits / grid).round() * grid
    draws = draws_of(params, vocab, seed)
    assert draws.on_device(logits) == draws.defined(logits)


@pytest.mark.parametrize(
    "params", [SamplingParams(top_k=3), SamplingParams(top_p=0.3), SamplingParams(top_k=5, top_p=0.6)]
)
def test_of_equal_logits_a_filter_keeps_the_smallest_ids(params: SamplingParams) -> None:
    assert set(counts_of(torch.zeros(1, 10), params, 12)) == {0, 1, 2}


@pytest.mark.parametrize("params", [SamplingParams(top_k=1), SamplingParams(top_p=1e-9), SamplingParams(min_p=1.0)])
def test_the_narrowest_filters_take_the_largest_logit(params: SamplingParams) -> None:
    logits = torch.randn(5, 700, generator=torch.Generator().manual_seed(1)) * 0.1
    draws = draws_of([params] * 5, 700)
    assert draws.on_device(logits) == logits.argmax(-1).tolist()


@pytest.mark.parametrize("params", [SamplingParams(temperature=0), SamplingParams(), SamplingParams(top_p=0.99)])
def test_tokens_without_a_finite_logit_are_never_drawn(params: SamplingParams) -> None:
    logits = torch.full((1, 2500), -float("inf"))
    logits[0, ::2] = float("nan")
    logits[0, [7, 2301]] = torch.tensor([0.0, 0.1])
    assert set(counts_of(logits, params, 20)) <= {7, 2301}


def test_no_temperature_overflows() -> None:
    logits = torch.tensor([[-3e4, 3e4, 2.9e4, 0.0]])
    for temperature in (1e-45, 1e-30, 1e-3):
        for top_k in (0, 2):
            assert set(counts_of(logits, SamplingParams(temperature=temperature, top_k=top_k), 5)) == {1}


def test_frequencies_follow_the_distribution_that_the_filters_leave() -> None:
    """Chi-square against the kept probabilities, at the 0.1 % level."""
    logits = torch.tensor([0.3, 0.25, 0.2, 0.1, 0.08, 0.05, 0.02]).log()
    params = SamplingParams(temperature=0.9, top_k=6, top_p=0.85, min_p=0.2)
    weights = (logits / 0.9).softmax(-1)
    kept = weights[:4] / weights[:4].sum()  # 0.08 lies behind 0.85 of the mass of six
    count = 20_000 if DEVICE.type == "cuda" else 120  # the interpreter takes its time
    seen = counts_of(logits.unsqueeze(0), params, count)
    assert set(seen) == {0, 1, 2, 3}
    chi_square = sum((seen[i] - count * float(kept[i])) ** 2 / (count * float(kept[i])) for i in range(4))
    assert chi_square < 16.27  # 3 degrees of freedom


def test_a_row_draws_the_same_token_in_any_batch() -> None:
    logits = torch.randn(len(KINDS), 300, generator=torch.Generator().manual_seed(2)) * 2
    draws = draws_of(KINDS, 300)
    together = draws.on_device(logits)
    order = random.Random(1).sample(range(len(KINDS)), len(KINDS))
    shuffled = Draws(
        [draws.params[i] for i in order], [draws.seeds[i] for i in order], [draws.history[i] for i in order]
    )
    assert shuffled.on_device(logits[order]) == [together[i] for i in order]
    for row in (8, 17):
        alone = Draws([draws.params[row]], [draws.seeds[row]], [draws.history[row]])
        assert alone.on_device(logits[row : row + 1]) == [together[row]]


@pytest.mark.gpu
@pytest.mark.parametrize("scale", [0.01, 2.5])
def test_on_a_gpu_a_large_vocabulary_draws_the_defined_token(scale: float) -> None:
    """Except that two tokens which finish side by side may be swapped by the rounding of another logarithm."""
    params = KINDS * 12
    logits = (torch.randn(len(params), 151_936, device=DEVICE) * scale).bfloat16()
    draws = draws_of(params, logits.shape[1])
    pairs = zip(draws.on_device(logits), draws.defined(logits), strict=True)
    assert sum(device != defined for device, defined in pairs) <= 1
