"""The simulation finds each fault that it is there for: an executor that obeyed wrong orders would prove nothing."""

from __future__ import annotations

import pytest

from mini_sglang.config import ResolvedConfig
from mini_sglang.request import Request
from mini_sglang.sampling_params import SamplingParams
from mini_sglang.scheduling.batch import NewPages, NewRequest, Row, ScheduledBatch, StepResult
from mini_sglang.scheduling.simulation import (
    GARBAGE,
    SimulatedExecutor,
    Simulation,
    WrongMaskError,
    WrongPageError,
    mask_for,
)

PLAIN, CONSTRAINED = SamplingParams(), SamplingParams(regex="a*")


def batch(*rows: Row, **fields: object) -> ScheduledBatch:
    orders = {"step": 1, "new_requests": [], "new_pages": [], "page_copies": [], **fields}
    return ScheduledBatch(rows=list(rows), **orders)  # type: ignore[arg-type]


def executor(params: SamplingParams = PLAIN) -> SimulatedExecutor:
    """Four pages of two tokens. Slot 0 has tokens 5 6 7 on pages 0 and 1, computed; slot 1 has 8 9, not computed."""
    result = SimulatedExecutor(num_pages=4, page_size=2, num_slots=3, vocab_size=3)
    new_requests = [NewRequest(0, [5, 6, 7], 3, params, 0), NewRequest(1, [8, 9], 2, params, 0)]
    new_pages = [NewPages(0, 0, [0, 1]), NewPages(1, 0, [2])]
    result.launch(batch(Row(0, 0, 3, False), new_requests=new_requests, new_pages=new_pages))
    return result


@pytest.mark.parametrize(
    ("orders", "problem"),
    [
        (batch(new_pages=[NewPages(1, 2, [3])]), "slot 1 has 1 pages and gains one at 2"),
        (batch(Row(2, 0, 1, False)), "slot 2 was never given to a request"),
        (batch(page_copies=[(0, 3), (1, 3)]), "two copies have the same destination"),
        (batch(Row(1, 0, 3, False)), "goes beyond its 2 tokens or 1 pages"),
        (batch(Row(0, 2, 2, False)), "goes beyond its 3 tokens or 2 pages"),
        (batch(Row(1, 1, 1, False), new_pages=[NewPages(1, 0, [0])]), "finds foreign content at its token 0"),
        (batch(Row(0, 0, 1, False), Row(1, 0, 1, False), new_pages=[NewPages(1, 0, [0])]), "write the same cell"),
    ],
)
def test_a_wrong_page_is_found(orders: ScheduledBatch, problem: str) -> None:
    with pytest.raises(WrongPageError, match=problem):
        executor().launch(orders)


def test_the_same_orders_with_the_right_pages_are_obeyed() -> None:
    (token,) = executor().launch(batch(Row(0, 2, 1, True), Row(1, 0, 2, False))).token_ids
    assert token != GARBAGE


@pytest.mark.parametrize("masks", [{}, {0: [mask_for(2)]}, {1: [mask_for(3)]}, {0: [mask_for(3)] * 2}])
def test_a_wrong_mask_is_found(masks: dict[int, list[bytes]]) -> None:
    with pytest.raises(WrongMaskError, match="samples under the mask"):
        executor(CONSTRAINED).launch(batch(Row(0, 2, 1, True), masks=masks))


def test_a_mask_that_nobody_asked_for_is_found() -> None:
    with pytest.raises(WrongMaskError, match="samples under the mask"):
        executor().launch(batch(Row(0, 2, 1, True), masks={0: [mask_for(3)]}))


def test_the_right_mask_is_obeyed() -> None:
    result = executor(CONSTRAINED).launch(batch(Row(0, 2, 1, True), masks={0: [mask_for(3)]}))
    assert result == StepResult(result.token_ids, [None], {0: []})


def simulation() -> Simulation:
    config = ResolvedConfig(
        num_pages=16, page_size=4, context_length=100, max_running_requests=4, max_prefill_tokens=16
    )
    result = Simulation(config)
    result.add(Request("a", [1, 2, 3], SamplingParams(max_tokens=4, prompt_logprobs=0)))
    return result


def test_work_that_never_ends_is_found() -> None:
    with pytest.raises(RuntimeError, match="work is left after 2 steps"):
        simulation().run(max_steps=2)


def test_a_wrong_output_is_found() -> None:
    subject = simulation()
    subject.run()
    subject.check_outputs()
    subject.requests["a"].output_ids[2] += 1
    with pytest.raises(RuntimeError, match="request a has a wrong output"):
        subject.check_outputs()


def test_wrong_log_probabilities_of_a_prompt_are_found() -> None:
    subject = simulation()
    subject.run()
    subject.looked_up["a"].pop()
    with pytest.raises(RuntimeError, match=r"request a has log-probabilities of \[2\]"):
        subject.check_outputs()
