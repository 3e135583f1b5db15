"""Checks of L4: each stage of the sampler alone, their order, and that a draw depends on nothing but its own row."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mini_sglang.execution.sampler import SamplingBatch, sample
from mini_sglang.kernels.noise import exponential_noise, row_keys
from mini_sglang.learn.checking import expect, expect_close, guards
from mini_sglang.sampling_params import SamplingParams

CPU = torch.device("cpu")


def batch(
    params: Sequence[SamplingParams],
    seeds: Sequence[int] | None = None,
    positions: Sequence[int] | None = None,
    history: list[int] | None = None,
    prompt_length: int = 1,
) -> SamplingBatch:
    rows = len(params)
    return SamplingBatch(
        params=list(params),
        seeds=list(seeds or [0] * rows),
        positions=list(positions or [1] * rows),
        prompt_lengths=[prompt_length] * rows,
        history=lambda row: torch.tensor(history or [0], dtype=torch.int32),
    )


def draws(logits: torch.Tensor, params: SamplingParams, count: int = 400, seed: int = 7) -> list[int]:
    """The tokens that one seed draws at `count` positions from the same logits [vocab]."""
    many = batch([params] * count, [seed] * count, list(range(count)))
    tokens: list[int] = sample(logits.expand(count, -1), many).tolist()
    return tokens


def log(probabilities: list[float]) -> torch.Tensor:
    return torch.tensor(probabilities).log()


# -- shapes -----------------------------------------------------------------------------------------------------------


def test_a_race_has_a_time_for_each_token_in_each_row() -> None:
    token_ids, keys = torch.arange(3, dtype=torch.int32), row_keys([7, 8], [0, 1], CPU)
    times = exponential_noise(token_ids, keys)
    expect(
        (tuple(times.shape), times.dtype),
        ((2, 3), torch.float32),
        "shape and dtype of the times of 3 tokens in the races of 2 rows",
        read="L4: Noise that is a function",
    )
    expect(
        tuple(exponential_noise(token_ids.repeat(2, 1), keys).shape),
        (2, 3),
        "shape of the times where each of the 2 rows names its own 3 tokens",
        read="L4: Noise that is a function",
    )


def test_a_token_far_ahead_of_all_others_is_drawn() -> None:
    settings = {
        "no filter": SamplingParams(),
        "top-k 2": SamplingParams(top_k=2),
        "temperature 0": SamplingParams(temperature=0),
        "temperature 0 and all penalties": SamplingParams(
            temperature=0, repetition_penalty=2.0, presence_penalty=1.0, frequency_penalty=1.0
        ),
    }
    for name, params in settings.items():
        drawn = sample(torch.tensor([[0.0, 60.0, 0.0]]), batch([params], history=[0, 1])).item()
        expect(drawn, 1, f"token drawn of logits 0, 60, 0 with {name}", read="L4: The idea")


# -- noise ------------------------------------------------------------------------------------------------------------


@guards("shared-generator")
def test_the_same_seed_and_position_draw_the_same_token_again() -> None:
    torch.manual_seed(0)
    logits, params = torch.randn(1000), SamplingParams(seed=3)
    expect(
        draws(logits, params, 20, seed=3),
        draws(logits, params, 20, seed=3),
        "20 tokens drawn by seed 3 at positions 0 to 19, twice",
        invariant="a draw is a function of (logits, seed, position)",
        read="L4: Noise that is a function",
    )


@guards("noise-by-row")
def test_a_row_draws_the_same_token_beside_any_neighbours() -> None:
    torch.manual_seed(0)
    logits = torch.randn(1, 1000)
    kinds = [SamplingParams(), SamplingParams(top_p=0.9), SamplingParams(top_k=40, temperature=2)]
    alone = [sample(logits, batch([kind], [i], [i + 5])).item() for i, kind in enumerate(kinds)]
    order = [2, 0, 1]
    together = sample(logits.expand(3, -1), batch([kinds[i] for i in order], order, [i + 5 for i in order])).tolist()
    expect(
        together,
        [alone[i] for i in order],
        "tokens of three requests in one batch, against each of them alone",
        invariant="a draw is a function of (logits, seed, position)",
        read="L4: Noise that is a function",
    )


@guards("seed-plus-position")
def test_neighbouring_seeds_are_strangers() -> None:
    logits, params = torch.zeros(1000), SamplingParams()
    expect(
        draws(logits, params, 21, seed=8)[:20] == draws(logits, params, 21, seed=7)[1:],
        False,
        "the tokens of seed 8 are those of seed 7, one position later",
        invariant="seed and position are mixed one after the other, not added",
        read="L4: Noise that is a function",
    )


@guards("noise-of-zero")
def test_no_token_finishes_its_race_in_no_time() -> None:
    # of this token the hash has nearly all bits set, which a float32 rounds up to 1
    times = exponential_noise(torch.tensor([2209], dtype=torch.int32), row_keys([12], [28], CPU))
    expect(
        times.item() > 0,
        True,
        f"token 2209 takes time (its noise is {abs(times.item()):g}) in the race of seed 12 at position 28",
        invariant="noise > 0: a token with time 0 wins however unlikely it is",
        read="L4: Noise that is a function",
    )


# -- top-p ------------------------------------------------------------------------------------------------------------


@guards("drops-the-crossing-token")
def test_the_token_that_crosses_the_threshold_is_kept() -> None:
    found = draws(log([0.5, 0.3, 0.15, 0.05]), SamplingParams(top_p=0.6))
    expect(
        sorted(set(found)),
        [0, 1],
        "tokens drawn of 0.5, 0.3, 0.15, 0.05 with top-p 0.6",
        invariant="the kept tokens are the fewest whose probabilities reach top-p",
        read="L4: Top-p without a sort",
    )


@guards("candidates-for-the-whole")
def test_the_share_is_of_all_tokens_and_not_of_the_candidates() -> None:
    # 0.5, and 299 nearly equal tokens with 0.0017 each: a share of 0.55 needs 30 of those
    logits = torch.cat((torch.tensor([0.5]), torch.full((299,), 0.5 / 299))).log() - 1e-5 * torch.arange(300)
    found = set(draws(logits, SamplingParams(top_p=0.55), 4000)) - {0}
    expect(
        len(found) in (29, 30, 31),
        True,
        f"about 30 of 299 nearly equal tokens are drawn beside the likely one ({len(found)} were)",
        invariant="top-p is a share of the sum over the whole vocabulary",
        read="L4: Top-p without a sort",
    )


@guards("never-looks-further")
def test_a_flat_distribution_is_looked_at_as_a_whole() -> None:
    found = set(draws(torch.zeros(300), SamplingParams(top_p=0.9), 4000))
    expect(
        len(found) in (269, 270, 271),
        True,
        f"270 of 300 equal tokens are drawn with top-p 0.9 ({len(found)} were)",
        invariant="candidates suffice only if a filter cut before the last of them",
        read="L4: Top-p without a sort",
    )


# -- order ------------------------------------------------------------------------------------------------------------


@guards("top-p-before-temperature")
def test_top_p_is_a_share_of_the_tempered_distribution() -> None:
    # at temperature 4 these two are nearly even, so a share of 0.6 needs both
    found = draws(log([0.8, 0.2]), SamplingParams(temperature=4, top_p=0.6))
    expect(
        sorted(set(found)),
        [0, 1],
        "tokens drawn of probabilities 0.8 and 0.2 at temperature 4 with top-p 0.6",
        invariant="bias, penalties, temperature, top-k, top-p, min-p, draw",
        read="L4: Order of operations",
    )


@guards("top-p-of-everything")
def test_top_p_is_a_share_of_what_top_k_left() -> None:
    found = draws(log([0.4, 0.3, 0.3]), SamplingParams(top_k=2, top_p=0.5))
    expect(
        sorted(set(found)),
        [0],
        "tokens drawn of 0.4, 0.3, 0.3 with top-k 2 and top-p 0.5: of the two that are left the first has 0.57",
        invariant="each filter sees what the one before it left",
        read="L4: Order of operations",
    )


@guards("overflow")
def test_a_small_temperature_does_not_overflow() -> None:
    found = draws(torch.tensor([50.0, 50.0, -300.0]), SamplingParams(temperature=0.01, top_p=0.9))
    expect(
        sorted(set(found)),
        [0, 1],
        "tokens drawn of logits 50, 50, -300 at temperature 0.01 with top-p 0.9",
        invariant="exp() never sees a positive number",
        read="L4: Temperature",
    )


# -- penalties --------------------------------------------------------------------------------------------------------


@guards("penalty-lifts")
def test_a_repetition_penalty_makes_an_unlikely_token_less_likely_too() -> None:
    params = SamplingParams(temperature=0, repetition_penalty=2.0)
    found = sample(torch.tensor([[-1.0, -1.5]]), batch([params], history=[1])).item()
    expect(
        found,
        0,
        "the greedy token of logits -1 and -1.5, with a repetition penalty of 2 on the second",
        invariant="a penalty never raises a logit",
        read="L4: Penalties",
    )


@guards("prompt-counted")
def test_presence_and_frequency_look_at_the_output_alone() -> None:
    params = SamplingParams(temperature=0, presence_penalty=0.6)
    found = sample(torch.tensor([[1.0, 0.5, 0.0]]), batch([params], history=[0, 0, 2], prompt_length=2)).item()
    expect(
        found,
        0,
        "the greedy token of logits 1, 0.5, 0: the prompt holds the first, the output the third",
        invariant="presence and frequency count output tokens",
        read="L4: Penalties",
    )


@guards("logits-changed")
def test_the_logits_are_left_as_they_were() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0]])
    sample(logits, batch([SamplingParams(repetition_penalty=2.0)], history=[1]))
    expect(
        logits.tolist(),
        [[1.0, 2.0, 3.0]],
        "the model's logits, after a row with a penalty was sampled",
        invariant="log-probabilities are of the model's distribution",
        read="L4: Penalties",
    )


# -- all of it --------------------------------------------------------------------------------------------------------


def test_frequencies_follow_the_distribution() -> None:
    probabilities = [0.5, 0.3, 0.15, 0.05]
    found = draws(log(probabilities), SamplingParams(), 10_000)
    off = [abs(found.count(token) / 10_000 - p) < 0.02 for token, p in enumerate(probabilities)]
    expect(
        off,
        [True] * 4,
        "whether 10,000 draws of 0.5, 0.3, 0.15, 0.05 come so often, within 0.02",
        invariant="token i finishes first with probability softmax(logits)[i]",
        read="L4: The idea",
    )


def test_unlikely_tokens_under_a_filter_that_cuts_nothing_are_drawn_as_without_it() -> None:
    torch.manual_seed(0)
    logits = torch.randn(1000)
    expect(
        draws(logits, SamplingParams(min_p=1e-30), 100),
        draws(logits, SamplingParams(), 100),
        "100 tokens, with a filter that keeps everything and without one",
        invariant="a token's time depends on its id, not on its place among the candidates",
        read="L4: Noise that is a function",
    )


def test_min_p_is_relative_to_the_most_likely_token() -> None:
    found = draws(log([0.5, 0.26, 0.24]), SamplingParams(min_p=0.5))
    expect(
        sorted(set(found)),
        [0, 1],
        "tokens drawn of 0.5, 0.26, 0.24 with min-p 0.5",
        invariant="min-p keeps what is at least so many times as likely as the most likely token",
        read="L4: Order of operations",
    )


def test_a_seed_means_the_same_as_in_the_kernels_of_a_gpu() -> None:
    keys = row_keys([42], [37], CPU)
    rule = "the noise of a (seed, position, token) is the same everywhere"
    where = "seed 42 at position 37"
    expect(keys.tolist(), [-2052453273], f"key of {where}", invariant=rule, read="L4: Noise that is a function")
    expect_close(
        exponential_noise(torch.arange(3, dtype=torch.int32), keys)[0],
        [0.347107, 1.375177, 0.0386083],
        f"times of tokens 0, 1, 2 in the race of {where}",
        invariant=rule,
        read="L4: Noise that is a function",
    )
