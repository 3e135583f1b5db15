"""The sampler draws each row by its own parameters, in the documented order, whatever the other rows ask for."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter

import msgspec
import pytest
import torch

from mini_sglang.execution.sampler import SamplingBatch, sample, token_logprobs
from mini_sglang.sampling_params import SamplingParams

VOCAB = 1000


def batch(
    params: list[SamplingParams],
    seeds: list[int] | None = None,
    positions: list[int] | None = None,
    history: list[list[int]] | None = None,
    prompt_lengths: list[int] | None = None,
) -> SamplingBatch:
    rows = len(params)
    tokens = history or [[0]] * rows
    return SamplingBatch(
        params=params,
        seeds=seeds or [0] * rows,
        positions=positions or [1] * rows,
        prompt_lengths=prompt_lengths or [1] * rows,
        history=lambda row: torch.tensor(tokens[row], dtype=torch.int32),
    )


def draws(logits: torch.Tensor, params: SamplingParams, count: int) -> Counter[int]:
    """Token frequencies over `count` positions of one seed."""
    many = sample(logits.expand(count, -1), batch([params] * count, [7] * count, list(range(count))))
    return Counter(many.tolist())


def log(probabilities: list[float]) -> torch.Tensor:
    return torch.tensor([probabilities]).log()


def test_temperature_zero_takes_the_largest_logit() -> None:
    logits = torch.randn(5, VOCAB)
    assert sample(logits, batch([SamplingParams(temperature=0)] * 5)).tolist() == logits.argmax(-1).tolist()


def test_the_logits_given_are_left_unchanged() -> None:
    logits = torch.randn(2, VOCAB)
    before = logits.clone()
    sample(logits, batch([SamplingParams(logit_bias={3: 50.0}, repetition_penalty=2.0), SamplingParams(top_k=3)]))
    assert torch.equal(logits, before)


def test_frequencies_follow_the_distribution() -> None:
    counts = draws(log([0.5, 0.3, 0.15, 0.05]), SamplingParams(), 20_000)
    for token, probability in enumerate([0.5, 0.3, 0.15, 0.05]):
        assert counts[token] / 20_000 == pytest.approx(probability, abs=0.015)


def test_temperature_sharpens_and_flattens() -> None:
    counts = draws(log([0.8, 0.2]), SamplingParams(temperature=0.5), 20_000)
    assert counts[0] / 20_000 == pytest.approx(0.64 / 0.68, abs=0.01)


def test_a_tiny_temperature_does_not_overflow() -> None:
    assert set(draws(torch.tensor([[50.0, 49.0, -300.0]]), SamplingParams(temperature=1e-6), 50)) == {0}


@pytest.mark.parametrize("top_k", [0, -1, 10, 10_000_000])
def test_top_k_of_zero_minus_one_or_beyond_the_vocabulary_is_off(top_k: int) -> None:
    logits = torch.zeros(1, 10)
    assert len(draws(logits, SamplingParams(top_k=top_k), 500)) == 10


def test_top_k_one_is_greedy() -> None:
    logits = torch.randn(1, VOCAB)
    assert set(draws(logits, SamplingParams(top_k=1, temperature=5), 100)) == {int(logits.argmax())}


def test_top_p_keeps_the_token_that_crosses_the_threshold() -> None:
    counts = draws(log([0.5, 0.3, 0.15, 0.05]), SamplingParams(top_p=0.6), 5_000)
    assert set(counts) == {0, 1}
    assert counts[0] / 5_000 == pytest.approx(0.625, abs=0.03)


def test_top_p_looks_beyond_the_first_candidates_where_the_distribution_is_flat() -> None:
    assert len(draws(torch.zeros(1, VOCAB), SamplingParams(top_p=0.9), 10_000)) == pytest.approx(900, abs=2)


def test_top_p_is_a_share_of_what_top_k_left() -> None:
    # of {0.4, 0.3, 0.3} top-k 2 leaves 0.57 and 0.43, so top-p 0.5 keeps only the first
    assert set(draws(log([0.4, 0.3, 0.3]), SamplingParams(top_k=2, top_p=0.5), 200)) == {0}


def test_min_p_is_relative_to_the_most_likely_token() -> None:
    assert set(draws(log([0.5, 0.26, 0.24]), SamplingParams(min_p=0.5), 500)) == {0, 1}


def test_filters_apply_after_the_temperature() -> None:
    # at temperature 4 the two tokens are nearly even, so top-p 0.6 keeps both; before it, it would keep one
    assert set(draws(log([0.8, 0.2]), SamplingParams(temperature=4, top_p=0.6), 500)) == {0, 1}


def test_the_same_seed_and_position_draw_the_same_token_beside_any_neighbours() -> None:
    torch.manual_seed(0)
    logits = torch.randn(1, VOCAB)
    kinds = [
        SamplingParams(),
        SamplingParams(top_p=0.9),
        SamplingParams(top_k=40),
        SamplingParams(min_p=0.02),
        SamplingParams(temperature=0),
        SamplingParams(top_k=400, top_p=0.99, temperature=2),
    ]
    alone = [sample(logits, batch([kind], [i], [i + 5])).item() for i, kind in enumerate(kinds)]
    rows = [3, 0, 5, 2, 4, 1]
    together = sample(logits.expand(6, -1), batch([kinds[i] for i in rows], list(rows), [i + 5 for i in rows])).tolist()
    assert together == [alone[i] for i in rows]


def test_another_seed_or_position_draws_anew() -> None:
    logits = torch.zeros(1, VOCAB)
    assert len({sample(logits, batch([SamplingParams()], [seed])).item() for seed in range(20)}) > 15
    assert len(draws(logits, SamplingParams(), 20)) > 15
    assert sample(logits, batch([SamplingParams()], [-(2**63)])).item() < VOCAB


def test_logit_bias_and_allowed_tokens_come_first() -> None:
    logits = torch.randn(1, VOCAB)
    assert sample(logits, batch([SamplingParams(temperature=0, logit_bias={7: 100.0})])).item() == 7
    params = SamplingParams(allowed_token_ids=[11, 12])
    assert set(draws(logits, params, 200)) <= {11, 12}


@pytest.mark.parametrize("params", [SamplingParams(temperature=0), SamplingParams(), SamplingParams(top_p=0.9)])
def test_a_mask_leaves_one_row_its_tokens_and_the_others_theirs(params: SamplingParams) -> None:
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(1))
    masked = msgspec.structs.replace(params, regex="a")
    mask = sum(1 << token_id for token_id in (0, 9, VOCAB - 1)).to_bytes(VOCAB // 8 + 8, "little")
    free = sample(logits, batch([params, params], [3, 3]))
    seen = set()
    for position in range(1, 40):
        both = sample(logits, dataclasses.replace(batch([masked, params], [3, 3], [position, 1]), masks={0: mask}))
        assert both[1] == free[1]
        seen.add(int(both[0]))
    best = max((0, 9, VOCAB - 1), key=logits[0].tolist().__getitem__)
    assert seen == {best} if params.temperature == 0 else best in seen
    assert seen <= {0, 9, VOCAB - 1}


def test_repetition_penalty_weakens_prompt_and_output_tokens() -> None:
    logits = torch.tensor([[2.0, -1.0, 1.5, -1.5]])
    params = SamplingParams(temperature=0, repetition_penalty=2.0)
    assert sample(logits, batch([params], history=[[0, 1]], prompt_lengths=[1])).item() == 2
    assert sample(logits, batch([params], history=[[3]])).item() == 0


def test_presence_and_frequency_look_at_the_output_alone() -> None:
    logits = torch.tensor([[1.0, 0.5, 0.0]])
    params = SamplingParams(temperature=0, presence_penalty=0.6)
    assert sample(logits, batch([params], history=[[0, 0, 0]], prompt_lengths=[3])).item() == 0
    assert sample(logits, batch([params], history=[[2, 0]], prompt_lengths=[1])).item() == 1
    params = SamplingParams(temperature=0, frequency_penalty=0.3)
    assert sample(logits, batch([params], history=[[2, 0]], prompt_lengths=[1])).item() == 0
    assert sample(logits, batch([params], history=[[2, 0, 0]], prompt_lengths=[1])).item() == 1


def test_logprobs_are_of_the_distribution_before_penalties_and_temperature() -> None:
    logits = torch.randn(3, VOCAB)
    params = [
        SamplingParams(temperature=0, logprobs=2, logit_bias={1: 100.0}),
        SamplingParams(),
        SamplingParams(temperature=0.1, logprobs=0),
    ]
    token_ids = sample(logits, batch(params))
    results = token_logprobs(logits, token_ids, params)
    expected = logits.log_softmax(-1)
    first = results[0]
    assert first is not None
    assert first.token_ids == [1, *expected[0].topk(2).indices.tolist()]
    assert first.logprobs == pytest.approx([expected[0, 1].item(), *expected[0].topk(2).values.tolist()], abs=1e-5)
    assert results[1] is None
    last = results[2]
    assert last is not None
    assert len(last.token_ids) == 1
    assert math.isclose(last.logprobs[0], expected[2, token_ids[2]].item(), abs_tol=1e-5)


def test_bfloat16_logits_sample_too() -> None:
    logits = torch.randn(2, VOCAB).bfloat16()
    assert sample(logits, batch([SamplingParams(temperature=0), SamplingParams(top_p=0.5)])).shape == (2,)


def test_bfloat16_logits_draw_what_they_say_in_float32() -> None:
    logits = torch.randn(200, VOCAB).bfloat16()
    params = batch([SamplingParams()] * 200, list(range(200)))
    assert torch.equal(sample(logits, params), sample(logits.float(), params))


def test_bfloat16_logits_far_below_the_largest_keep_their_order() -> None:
    logits = torch.tensor([[100, 0, 0.2]]).bfloat16()  # 100 and 99.8 are one number in bfloat16
    assert set(draws(logits, SamplingParams(temperature=50, top_k=2), 100)) == {0, 2}


def test_a_seeded_draw_survives_the_rounding_of_another_batch_or_a_cached_prefix() -> None:
    torch.manual_seed(0)
    logits = torch.randn(1, 50_000) * 2
    nudged = logits + torch.randn_like(logits) * 1e-6
    params = [SamplingParams()] * 500
    positions = list(range(500))
    first = sample(logits.expand(500, -1), batch(params, [3] * 500, positions))
    second = sample(nudged.expand(500, -1), batch(params, [3] * 500, positions))
    assert torch.equal(first, second)


def test_a_filter_that_cuts_nothing_draws_the_same_token_as_none() -> None:
    logits = torch.randn(1, VOCAB)
    none = draws(logits, SamplingParams(), 100)
    assert draws(logits, SamplingParams(top_k=VOCAB + 5), 100) == none
    assert draws(logits, SamplingParams(min_p=1e-30), 100) == none


def test_unlikely_tokens_are_drawn_as_often_as_they_should_be() -> None:
    """A thousand tokens share 1 % of the probability: the noise must be fine enough to reach them."""
    logits = torch.cat((torch.tensor([0.99]), torch.full((999,), 0.01 / 999))).log().unsqueeze(0)
    counts = draws(logits, SamplingParams(), 50_000)
    assert 1 - counts[0] / 50_000 == pytest.approx(0.01, abs=0.002)


def test_tokens_held_back_are_not_drawn_unless_nothing_else_may_be() -> None:
    logits = torch.tensor([[0.0, 5.0, 1.0]]).repeat(3, 1)
    held = SamplingParams(temperature=0, min_tokens=1)
    only = SamplingParams(temperature=0, min_tokens=1, allowed_token_ids=[1])
    rows = dataclasses.replace(batch([held, held, only]), held_back={0: [1, 2], 2: [1]})
    assert sample(logits, rows).tolist() == [0, 1, 1]


def test_the_only_allowed_token_is_drawn_whatever_its_noise() -> None:
    """Seed 12 at position 28 hands token 2209 a number that float32 rounds to 1."""
    params = SamplingParams(seed=12, allowed_token_ids=[2209])
    batch = SamplingBatch([params], seeds=[12], positions=[28], prompt_lengths=[1], history=lambda _: torch.tensor([0]))
    assert sample(torch.zeros(1, 3000), batch).tolist() == [2209]
