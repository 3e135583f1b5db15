"""Checks of L5: what a step contains, who is admitted, who gives way, and that nobody waits for ever."""

from __future__ import annotations

from mini_sglang.config import ResolvedConfig
from mini_sglang.learn.checking import expect, guards
from mini_sglang.request import Request, RequestStatus
from mini_sglang.sampling_params import SamplingParams
from mini_sglang.scheduling.batch import Row, ScheduledBatch, StepResult
from mini_sglang.scheduling.scheduler import Scheduler
from mini_sglang.scheduling.simulation import Simulation


def config(**fields: object) -> ResolvedConfig:
    defaults: dict[str, object] = {"page_size": 4, "num_pages": 64, "context_length": 200}
    defaults |= {"max_prefill_tokens": 16, "max_running_requests": 64}
    return ResolvedConfig(**{**defaults, **fields})  # type: ignore[arg-type]


def request(name: str, length: int, max_tokens: int = 8, *, like: int | None = None) -> Request:
    """A request of `length` equal tokens. It shares no beginning with another one, unless both are `like` the same."""
    token = sum(map(ord, name)) if like is None else like
    return Request(name, [token] * length, SamplingParams(max_tokens=max_tokens))


def one_step(scheduler: Scheduler) -> list[Row]:
    """Schedule a step, have it computed and read; returns its rows."""
    batch = scheduler.schedule()
    if batch is None:
        return []
    read(scheduler, batch)
    return batch.rows


def read(scheduler: Scheduler, batch: ScheduledBatch) -> None:
    sampled = sum(row.samples for row in batch.rows)
    scheduler.update(batch, StepResult([5] * sampled, [None] * sampled))


def used_up(simulation: Simulation, steps: int) -> None:
    for _ in range(steps):
        simulation.step()


# -- what a step contains ---------------------------------------------------------------------------------------------


@guards("one-token-a-step")
def test_a_request_has_computed_what_its_row_says() -> None:
    scheduler = Scheduler(config())
    scheduler.add(request("a", 10))
    found = [(row.start, row.count, row.samples) for _ in range(2) for row in one_step(scheduler)]
    expect(
        found,
        [(0, 10, True), (10, 1, True)],
        "(start, count, samples) of the rows of two steps, for a prompt of 10 tokens",
        invariant="start of the next row = start + count of the last one",
        read="L5: One number instead of two phases",
    )


@guards("sample-mid-prompt")
def test_a_row_samples_only_if_it_ends_with_the_last_known_token() -> None:
    scheduler = Scheduler(config())
    scheduler.add(request("a", 40))
    batch = scheduler.schedule()
    assert batch is not None
    (row,) = batch.rows
    expect(
        row.samples,
        row.start + row.count == 40,
        f"whether the row samples that computes tokens {row.start} to {row.start + row.count - 1} of a prompt of 40",
        invariant="a row samples when it computes the last known token",
        read="L5: Chunked prefill",
    )


@guards("no-chunks")
def test_a_prompt_longer_than_the_budget_is_cut() -> None:
    scheduler = Scheduler(config())
    scheduler.add(request("a", 30))
    found = [(row.start, row.count) for _ in range(3) for row in one_step(scheduler)]
    expect(
        found,
        [(0, 16), (16, 14), (30, 1)],
        "(start, count) of the rows of three steps, for a prompt of 30 tokens and a budget of 16",
        invariant="a step computes at most max_prefill_tokens tokens",
        read="L5: Chunked prefill",
    )


@guards("budget-unspent")
def test_prompts_that_are_admitted_together_share_the_budget() -> None:
    scheduler = Scheduler(config())
    for name in "abc":
        scheduler.add(request(name, 10))
    found = [(row.start, row.count) for row in one_step(scheduler)]
    expect(
        found,
        [(0, 10), (0, 6)],
        "(start, count) in the first step: three prompts of 10 tokens, a budget of 16",
        invariant="a step computes at most max_prefill_tokens tokens",
        read="L5: A step, filled from the top",
    )


@guards("decodes-uncounted")
def test_streams_are_paid_from_the_same_budget() -> None:
    scheduler = Scheduler(config(max_prefill_tokens=8))
    scheduler.add(request("a", 5, max_tokens=20))
    one_step(scheduler)
    scheduler.add(request("b", 14))
    found = [(row.start, row.count) for row in one_step(scheduler)]
    expect(
        found,
        [(5, 1), (0, 7)],
        "(start, count) beside one stream: a prompt of 14 tokens, a budget of 8",
        invariant="a step computes at most max_prefill_tokens tokens",
        read="L5: A step, filled from the top",
    )


@guards("starved-prompts")
def test_a_prompt_advances_beside_any_number_of_streams() -> None:
    simulation = Simulation(config(max_prefill_tokens=2, num_pages=400))
    for name in "abcd":
        simulation.add(request(name, 2, max_tokens=100))
        simulation.step()
    simulation.add(request("prompt", 20, max_tokens=1))
    used_up(simulation, 25)
    expect(
        "prompt" in simulation.finished,
        True,
        "a prompt of 20 tokens has ended after 25 steps, beside 4 streams and with a budget of 2",
        invariant="a step with a prompt computes at least one token of it",
        read="L5: A step, filled from the top",
    )


# -- admission --------------------------------------------------------------------------------------------------------


@guards("worst-case-admission")
def test_admission_reckons_with_answers_of_the_usual_length() -> None:
    simulation = Simulation(config(num_pages=40))
    simulation.scheduler.expected_output = 2.0
    for index in range(8):
        simulation.add(request(f"{index}", 4, max_tokens=100))
    used_up(simulation, 2)
    expect(
        simulation.scheduler.stats().num_running,
        7,
        "running requests: each may take 25 of 40 pages, but answers have had 2 tokens so far",
        read="L5: Admission is a bet",
    )


@guards("admit-greedily")
def test_not_more_are_admitted_than_are_expected_to_end() -> None:
    simulation = Simulation(config(num_pages=20, max_prefill_tokens=64))
    simulation.scheduler.expected_output = 20.0
    for name in "abcdef":
        simulation.add(request(name, 4, max_tokens=20))
    simulation.run()
    expect(
        simulation.scheduler.stats().num_preemptions,
        0,
        "preemptions: 6 requests of 6 pages each, 20 pages, and answers as long as expected",
        read="L5: Admission is a bet",
    )


@guards("big-one-starves")
def test_a_large_request_is_not_passed_by_small_ones_that_came_later() -> None:
    simulation = Simulation(config(num_pages=16, max_prefill_tokens=64))
    simulation.scheduler.expected_output = 4.0
    simulation.add(request("running", 20, max_tokens=40))
    simulation.step()
    simulation.add(request("large", 48, max_tokens=4))
    simulation.add(request("small", 4, max_tokens=4))
    used_up(simulation, 3)
    expect(
        [name for name, each in simulation.requests.items() if each.was_admitted],
        ["running"],
        "admitted, while the first that waits needs 13 pages, the second 2, and 10 are free",
        invariant="under fcfs nobody is passed",
        read="L5: Fairness",
    )


@guards("starved-by-the-popular")
def test_a_request_without_a_cached_prefix_is_passed_a_bounded_number_of_times() -> None:
    simulation = Simulation(config(schedule="lpm", max_running_requests=1))
    simulation.add(request("first", 20, max_tokens=1, like=1))
    simulation.run()
    cold = request("cold", 20, max_tokens=1)
    simulation.add(cold)
    passed = 0
    for index in range(80):
        simulation.add(request(f"hot {index}", 20, max_tokens=1, like=1))
        simulation.step()
        passed += not cold.was_admitted
    expect(
        passed <= 33,
        True,
        f"the request whose prompt nobody shares was admitted in time (it was passed {passed} times by popular ones)",
        invariant="the longest waiting request is passed at most MAX_OVERTAKEN times",
        read="L5: Fairness",
    )


# -- running out of pages ---------------------------------------------------------------------------------------------


def crowded(count: int, max_tokens: int = 25) -> tuple[Simulation, dict[str, int]]:
    """Too many requests for 12 pages, all admitted at once, run to their end; and the tokens that each was sent."""
    simulation = Simulation(config(num_pages=12))
    simulation.scheduler.expected_output = 0.0
    for index in range(count):
        simulation.add(request(chr(97 + index), 6, max_tokens))
    sent = dict.fromkeys(simulation.requests, 0)
    for _ in range(1000):
        for output in simulation.step():
            sent[output.request_id] += len(output.token_ids)
        if not simulation.scheduler.has_work:
            break
    return simulation, sent


@guards("preempt-the-oldest")
def test_the_last_in_rank_gives_way() -> None:
    scheduler = Scheduler(config(num_pages=12))
    scheduler.expected_output = 0.0
    requests = [request(name, 6, max_tokens=30) for name in "abc"]
    for each in requests:
        scheduler.add(each)
    for _ in range(60):
        one_step(scheduler)
        if scheduler.stats().num_preemptions:
            break
    expect(
        [each.request_id for each in requests if each.status is RequestStatus.WAITING],
        ["c"],
        "who gave its pages back, when a, b and c, which came in this order, had filled the pool",
        invariant="the last in rank gives way, so the first always advances and nothing blocks for ever",
        read="L5: Preemption",
    )


@guards("preempt-forgets-output")
def test_a_preempted_request_resumes_where_it_was() -> None:
    simulation, sent = crowded(6)
    expect(
        sent,
        dict.fromkeys("abcdef", 25),
        f"tokens sent of each request, after {simulation.scheduler.stats().num_preemptions} preemptions",
        invariant="a token that was sent is never sent again",
        read="L5: Preemption",
    )


@guards("freed-in-flight")
def test_pages_come_back_when_no_launched_step_contains_their_request() -> None:
    scheduler = Scheduler(config())
    scheduler.add(request("a", 3))
    batch = scheduler.schedule()
    assert batch is not None
    scheduler.abort("a")
    in_flight = scheduler.stats().num_used_pages
    read(scheduler, batch)
    expect(
        (in_flight, scheduler.stats().num_used_pages),
        (1, 0),
        "pages of an aborted request: while a step with it is on the device, and when that was read",
        invariant="a page that a launched step writes belongs to nobody else",
        read="L5: Running ahead",
    )


def test_a_crowd_gets_the_right_tokens_and_leaves_nothing_behind() -> None:
    simulation, _ = crowded(6)
    simulation.check_outputs()
    simulation.scheduler.check()
    expect(simulation.scheduler.stats().num_used_pages, 0, "pages held when all have ended")
