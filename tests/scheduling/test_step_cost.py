"""StepCost and PromptBudget: what a step is predicted to take, and how its prompts share it."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mini_sglang.scheduling.batch import Row
from mini_sglang.scheduling.step_cost import PromptBudget, StepCost, Work, work_of

TRUE = StepCost(step=4000, decode=20, context=0.04, token=25, pair=0.001)


def test_work_counts_decodes_and_the_pairs_of_prompt_tokens() -> None:
    rows = [Row(0, 100, 1, True), Row(1, 7, 1, True), Row(2, 0, 3, True), Row(3, 10, 2, False)]
    assert work_of(rows) == Work(steps=1, decodes=2, context=107, tokens=5, pairs=(1 + 2 + 3) + (11 + 12))


@given(
    us=st.floats(0, 1e7),
    start=st.integers(0, 200_000),
    token=st.floats(0.1, 1e4),
    pair=st.floats(1e-6, 10),
)
def test_the_most_tokens_within_a_time_take_no_longer_and_one_more_would(
    us: float, start: int, token: float, pair: float
) -> None:
    cost = StepCost(1000, 1, 1, token, pair)
    count = cost.tokens_within(us, start)
    assert cost.prompt_us(start, count) <= us * (1 + 1e-9)
    assert cost.prompt_us(start, count + 1) > us * (1 - 1e-9)


def test_a_prompt_adds_what_the_model_predicts_for_its_row() -> None:
    alone, beside = work_of([Row(0, 50, 1, True)]), work_of([Row(0, 50, 1, True), Row(1, 30, 400, False)])
    assert TRUE.predict(beside) - TRUE.predict(alone) == pytest.approx(TRUE.prompt_us(30, 400))


def test_predictions_follow_what_steps_take_however_wrong_they_begin() -> None:
    chance = random.Random(0)
    for factor in (0.2, 1.0, 5.0):
        cost = StepCost(*(us * factor * chance.uniform(0.5, 2) for us in TRUE.us_of))
        for _ in range(300):
            work = random_work(chance)
            cost.learn(work, TRUE.predict(work) * chance.uniform(0.9, 1.1))
        for _ in range(100):
            work = random_work(chance)
            assert cost.predict(work) == pytest.approx(TRUE.predict(work), rel=0.25)


def random_work(chance: random.Random) -> Work:
    """A step with prompts beside decodes, as a busy server has them."""
    decodes, tokens = chance.randrange(1, 256), chance.randrange(1, 2048)
    return Work(1, decodes, decodes * chance.randrange(100, 2000), tokens, tokens * chance.randrange(50, 4000))


def test_a_step_that_was_held_up_counts_as_at_most_twice_what_was_predicted() -> None:
    held_up, twice = StepCost(*TRUE.us_of), StepCost(*TRUE.us_of)
    work = Work(1, 8, 4000, 500, 200_000)
    held_up.learn(work, 3600e6)
    twice.learn(work, 2 * TRUE.predict(work))
    assert held_up.us_of == twice.us_of


def test_no_part_falls_to_nothing_whatever_is_seen() -> None:
    chance, cost = random.Random(1), StepCost(*TRUE.us_of)
    for _ in range(10_000):
        cost.learn(random_work(chance), 1.0)
        assert min(cost.us_of) > 0


def test_a_budget_of_tokens_is_spent_to_the_last_one() -> None:
    budget = PromptBudget(100)
    assert budget.chunk(0, 70) == 70
    budget.take(0, 70, 70)
    assert budget.chunk(0, 50) == 30
    budget.take(0, 30, 50)
    assert budget.chunk(0, 50) == 0


def test_a_budget_of_time_counts_the_context_of_a_chunk() -> None:
    at_start, far_on = (PromptBudget(100_000, 40_000, TRUE).chunk(start, 1000) for start in (0, 0))
    assert at_start == far_on == 1000
    near, far = (PromptBudget(100_000, 10_000, TRUE).most(start) for start in (0, 100_000))
    assert near > 3 * far > 0


def test_the_first_prompt_gets_a_token_where_there_is_no_time_at_all() -> None:
    budget = PromptBudget(100, 0.0, TRUE)
    assert budget.chunk(0, 2) == 1
    budget.take(0, 1, 2)
    assert budget.chunk(0, 2) == 0


def test_a_long_prompt_leaves_half_to_those_that_can_end_and_takes_what_they_leave() -> None:
    budget = PromptBudget(100)
    assert budget.chunk(0, 1000) == 50
    budget.take(0, 50, 1000)
    assert budget.chunk(0, 60) == 0
    assert budget.chunk(0, 30) == 30
    budget.take(0, 30, 30)
    assert budget.chunk(0, 900) == 0
    assert budget.most(50) == 20


def test_a_prompt_of_two_steps_is_not_long() -> None:
    assert PromptBudget(100).chunk(0, 200) == 100


def test_a_prompt_that_was_cut_leaves_no_crumbs_to_prompts_with_less_context() -> None:
    budget = PromptBudget(100_000, 20_000, TRUE)
    count = budget.chunk(100_000, 250)
    assert 125 < count < 250
    budget.take(100_000, count, 250)
    assert budget.most(0) == 0


def test_a_prompt_that_gets_no_part_of_the_step_leaves_no_half_of_it() -> None:
    budget = PromptBudget(100)
    assert budget.chunk(0, 1000) == 50  # but there were no pages for it
    assert budget.chunk(0, 110) == 100
