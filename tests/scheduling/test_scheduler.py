"""Scheduler: what a step contains, who waits for whom, and how requests end."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from mini_sglang.config import ResolvedConfig
from mini_sglang.errors import FieldError
from mini_sglang.outputs import FinishReason
from mini_sglang.request import Request
from mini_sglang.sampling_params import SamplingParams
from mini_sglang.scheduling.batch import ScheduledBatch, StepResult
from mini_sglang.scheduling.policy import MAX_OVERTAKEN
from mini_sglang.scheduling.radix_cache import Match
from mini_sglang.scheduling.scheduler import Scheduler
from mini_sglang.scheduling.simulation import Simulation, generate
from mini_sglang.scheduling.stats import STEP_SIZES
from mini_sglang.scheduling.step_cost import StepCost, work_of


def config(**fields: object) -> ResolvedConfig:
    defaults = {"page_size": 4, "num_pages": 64, "context_length": 200}
    defaults |= {"max_prefill_tokens": 16, "max_running_requests": 64}
    return ResolvedConfig(**{**defaults, **fields})  # type: ignore[arg-type]


def request(name: str, tokens: list[int], max_tokens: int | None = 8, **fields: object) -> Request:
    return Request(name, tokens, SamplingParams(max_tokens=max_tokens), **fields)  # type: ignore[arg-type]


def distinct(name: int, length: int) -> list[int]:
    """A prompt that shares no beginning with one of another name."""
    return [name] * length


def rows(batch: ScheduledBatch | None) -> list[tuple[int, int, bool]]:
    assert batch is not None
    return [(row.start, row.count, bool(row.samples)) for row in batch.rows]


def read(scheduler: Scheduler, batch: ScheduledBatch, token: int = 5) -> None:
    sampled = sum(row.samples for row in batch.rows)
    scheduler.update(batch, StepResult([token] * sampled, [None] * sampled))


# -- what a step contains ---------------------------------------------------------------------------------------------


def test_a_long_prompt_is_cut_into_chunks_and_sampled_at_its_end() -> None:
    scheduler = Scheduler(config())
    scheduler.add(request("a", distinct(1, 40)))
    seen = []
    for _ in range(4):
        batch = scheduler.schedule()
        assert batch is not None
        seen += rows(batch)
        read(scheduler, batch)
    assert seen == [(0, 16, False), (16, 16, False), (32, 8, True), (40, 1, True)]


def test_prompts_share_the_budget_of_a_step() -> None:
    scheduler = Scheduler(config())
    scheduler.add(request("a", distinct(1, 24)))
    scheduler.add(request("b", distinct(2, 24)))
    seen = [rows(scheduler.schedule()) for _ in range(3)]
    assert seen[0] == [(0, 16, False)]
    assert seen[1] == [(16, 8, True), (0, 8, False)]
    assert seen[2] == [(24, 1, True), (8, 15, False)]


def test_running_streams_get_a_token_in_every_step_beside_a_long_prompt() -> None:
    simulation = Simulation(config(max_prefill_tokens=8, num_pages=100, context_length=400))
    simulation.add(request("stream", distinct(1, 4), max_tokens=40))
    simulation.step()
    for name in range(3):
        simulation.add(request(f"long {name}", distinct(name + 2, 100), max_tokens=1))
    for _ in range(39):
        assert "stream" in [output.request_id for output in simulation.step()]


def test_a_budget_that_streams_use_up_still_lets_a_prompt_advance() -> None:
    simulation = Simulation(config(max_prefill_tokens=2, num_pages=400))
    for name in range(4):
        simulation.add(request(f"stream {name}", distinct(name, 2), max_tokens=100))
        simulation.step()
    simulation.add(request("prompt", distinct(9, 20), max_tokens=1))
    for _ in range(20):
        simulation.step()
    assert simulation.finished["prompt"] is FinishReason.LENGTH


def test_a_new_row_carries_the_prompt_and_a_decode_row_only_numbers() -> None:
    scheduler = Scheduler(config())
    scheduler.add(request("a", [1, 2, 3], seed=11))
    batch = scheduler.schedule()
    assert batch is not None
    (new,) = batch.new_requests
    assert (new.token_ids, new.num_prompt_tokens, new.seed) == ([1, 2, 3], 3, 11)
    read(scheduler, batch)
    batch = scheduler.schedule()
    assert batch is not None
    assert (batch.new_requests, batch.new_pages, batch.num_tokens) == ([], [], 1)


def test_a_step_names_the_requests_that_take_a_slot_with_it() -> None:
    scheduler = Scheduler(config())
    for names in (["a", "b"], ["c"], []):
        for name in names:
            scheduler.add(request(name, [ord(name), 1]))
        number = scheduler.next_step
        scheduler.schedule()
        assert scheduler.latest_step.admitted == names
        assert scheduler.latest_step.batch.step == number


def test_steps_can_be_launched_ahead_without_exceeding_max_tokens() -> None:
    scheduler = Scheduler(config())
    scheduler.add(request("a", [1, 2, 3], max_tokens=3))
    batches = [scheduler.schedule() for _ in range(3)]
    assert [rows(batch) for batch in batches] == [[(0, 3, True)], [(3, 1, True)], [(4, 1, True)]]
    assert scheduler.schedule() is None
    assert scheduler.has_work
    for batch in batches:
        assert batch is not None
        read(scheduler, batch)
    assert not scheduler.has_work
    scheduler.check()


def test_steps_are_read_in_the_order_of_their_launch() -> None:
    scheduler = Scheduler(config())
    scheduler.add(request("a", [1, 2, 3]))
    first, second = scheduler.schedule(), scheduler.schedule()
    assert first is not None
    assert second is not None
    with pytest.raises(ValueError, match="step 2 is not the oldest launched step"):
        read(scheduler, second)
    read(scheduler, first)
    read(scheduler, second)


def test_the_same_requests_give_the_same_schedule() -> None:
    def run() -> list[object]:
        scheduler = Scheduler(config(num_pages=20))
        batches: list[object] = []
        for name in range(12):
            scheduler.add(request(str(name), distinct(name % 5, 10 + name), max_tokens=20))
        while (batch := scheduler.schedule()) is not None:
            batches.append(batch)
            read(scheduler, batch)
        return batches

    assert run() == run()


# -- refusing ---------------------------------------------------------------------------------------------------------


def test_an_empty_prompt_is_refused() -> None:
    scheduler = Scheduler(config())
    with pytest.raises(FieldError, match="prompt must hold at least one token, got none"):
        scheduler.add(request("a", []))


@pytest.mark.parametrize(("length", "limit"), [(50, "50"), (51, "50")])
def test_a_prompt_that_leaves_no_room_in_the_context_is_refused_with_both_numbers(length: int, limit: str) -> None:
    scheduler = Scheduler(config(context_length=50))
    with pytest.raises(ValueError, match=f"^prompt has {length} tokens.* {limit} tokens"):
        scheduler.add(request("a", distinct(1, length)))
    assert not scheduler.has_work


def test_a_prompt_larger_than_the_pool_is_refused_with_both_numbers() -> None:
    scheduler = Scheduler(config(num_pages=5))
    with pytest.raises(ValueError, match="prompt has 21 tokens, but the KV cache holds only 20 tokens"):
        scheduler.add(request("a", distinct(1, 21)))


def test_an_id_can_be_used_again_only_after_its_request_has_ended() -> None:
    simulation = Simulation(config())
    simulation.add(request("a", [1]))
    with pytest.raises(ValueError, match="request_id 'a' is in use"):
        simulation.add(request("a", [1]))
    simulation.run()
    simulation.add(request("a", [1]))
    simulation.run()


# -- ending -----------------------------------------------------------------------------------------------------------


def end_after(tokens: list[int], **fields: object) -> tuple[FinishReason | None, int | None]:
    params = {key: fields.pop(key) for key in ("stop_token_ids", "ignore_eos", "max_tokens") if key in fields}
    scheduler = Scheduler(config(**fields))
    new = Request("a", [1, 2], SamplingParams(**params), eos_token_ids=frozenset([7]))  # type: ignore[arg-type]
    scheduler.add(new)
    for token in tokens:
        batch = scheduler.schedule()
        assert batch is not None
        (output,) = scheduler.update(batch, StepResult([token], [None]))
        if output.finish_reason is not None:
            assert not scheduler.has_work
            return output.finish_reason, output.stop_token_id
    return None, None


def test_an_end_token_ends_the_request_unless_it_is_ignored() -> None:
    assert end_after([3, 7]) == (FinishReason.STOP, 7)
    assert end_after([3, 7, 7], ignore_eos=True) == (None, None)


def test_a_stop_token_ends_the_request_even_where_end_tokens_are_ignored() -> None:
    assert end_after([3, 9], stop_token_ids=[9], ignore_eos=True) == (FinishReason.STOP, 9)


def test_an_end_token_in_the_last_place_is_a_stop() -> None:
    assert end_after([3, 7], max_tokens=2) == (FinishReason.STOP, 7)
    assert end_after([3, 3], max_tokens=2) == (FinishReason.LENGTH, None)


def test_prompt_and_output_never_exceed_the_context() -> None:
    assert end_after([3] * 6, context_length=8) == (FinishReason.LENGTH, None)
    assert end_after([3] * 5, context_length=8) == (None, None)


@pytest.mark.parametrize("run_ahead", [0, 1])
def test_one_request_that_outgrows_the_pool_ends_with_length(run_ahead: int) -> None:
    simulation = Simulation(config(num_pages=8, run_ahead=run_ahead))
    simulation.add(request("big", distinct(1, 19), max_tokens=None))
    simulation.add(request("small", distinct(2, 3), max_tokens=6))
    simulation.run(200)
    assert simulation.finished == {"big": FinishReason.LENGTH, "small": FinishReason.LENGTH}
    assert len(simulation.requests["big"].output_ids) == 8 * 4 + 1 - 19  # the last token needs no place
    simulation.check_outputs()


def test_a_stop_found_in_the_text_counts_as_finished_and_an_abort_as_aborted() -> None:
    simulation = Simulation(config())
    for name in "abc":
        simulation.add(request(name, [ord(name)]))
    simulation.step()
    simulation.scheduler.abort("a", FinishReason.STOP)
    simulation.scheduler.abort("b")
    simulation.scheduler.abort("unknown")
    simulation.run()
    stats = simulation.scheduler.stats()
    assert (stats.num_finished, stats.num_aborted) == (2, 1)


@pytest.mark.parametrize("run_ahead", [0, 1, 2])
def test_requests_aborted_at_any_step_up_to_their_last_leave_nothing_behind(run_ahead: int) -> None:
    simulation = Simulation(config(run_ahead=run_ahead, max_running_requests=4))
    for count in range(1, 21):
        for name in "abcd":
            simulation.add(request(f"{name}{count}", [count, ord(name)], max_tokens=count))
        for _ in range(count - 1):
            simulation.step()
        for name in "abcd":
            simulation.scheduler.abort(f"{name}{count}")
        simulation.scheduler.check()
    simulation.run()
    stats = simulation.scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_used_pages) == (0, 0, 0)
    assert stats.num_finished + stats.num_aborted == 80
    assert not simulation.scheduler.kv._holdings
    simulation.check_outputs()


def test_a_request_can_be_ended_between_two_tokens() -> None:
    simulation = Simulation(config())
    simulation.add(request("a", distinct(1, 8)))
    simulation.run()
    simulation.add(request("b", distinct(1, 9), max_tokens=50))
    simulation.step()
    output = simulation.scheduler.end("b", FinishReason.ERROR, "no such schema", "regex")
    assert output is not None
    assert (output.request_id, output.token_ids, output.num_cached_tokens) == ("b", [], 8)
    assert (output.finish_reason, output.error, output.error_field) == (FinishReason.ERROR, "no such schema", "regex")
    assert simulation.scheduler.end("b", FinishReason.ERROR) is None
    simulation.run()
    assert simulation.scheduler.stats().num_used_pages == 0


def test_pages_of_an_ended_request_come_back_when_no_launched_step_contains_it() -> None:
    scheduler = Scheduler(config())
    scheduler.add(request("a", [1, 2, 3]))
    batch = scheduler.schedule()
    assert batch is not None
    scheduler.abort("a")
    assert scheduler.stats().num_used_pages == 1
    assert scheduler.stats().num_running == 0
    read(scheduler, batch)
    assert scheduler.stats().num_used_pages == 0


# -- failing ----------------------------------------------------------------------------------------------------------


def test_a_failed_step_ends_its_requests_and_leaves_no_unwritten_page_in_the_cache() -> None:
    simulation = Simulation(config(max_running_requests=1))
    simulation.add(request("a", distinct(1, 30)))
    simulation.add(request("b", distinct(1, 30)))
    simulation.step()
    (output,) = simulation.step(fail_launch=True)
    assert (output.request_id, output.finish_reason, output.error) == ("a", FinishReason.ERROR, "the launch failed")
    simulation.run()
    assert simulation.requests["b"].num_cached_tokens == 16  # what the first step wrote
    simulation.check_outputs()


def test_pages_of_an_ended_request_come_back_too_when_the_step_that_contains_it_fails() -> None:
    scheduler = Scheduler(config())
    scheduler.add(request("a", [1, 2, 3]))
    batch = scheduler.schedule()
    assert batch is not None
    scheduler.abort("a")
    assert scheduler.fail(batch, "the step failed").others == []
    assert scheduler.stats().num_used_pages == 0
    scheduler.check()


def test_only_a_launched_step_can_fail() -> None:
    scheduler = Scheduler(config())
    scheduler.add(request("a", [1, 2, 3]))
    batch = scheduler.schedule()
    assert batch is not None
    read(scheduler, batch)
    with pytest.raises(ValueError, match="step 1 was not launched, or was read before"):
        scheduler.fail(batch, "the step failed")


def test_after_a_failed_launch_the_page_tables_of_all_that_run_are_sent_again() -> None:
    scheduler = Scheduler(config())
    scheduler.add(Request("waits for its mask", distinct(1, 6), SamplingParams(regex="a*")))
    scheduler.set_masks("waits for its mask", [b""], [], [])
    batch = scheduler.schedule()
    assert batch is not None
    (pages,) = batch.new_pages
    read(scheduler, batch)
    scheduler.add(request("fails", distinct(2, 6)))
    batch = scheduler.schedule()
    assert batch is not None
    scheduler.fail(batch, "the launch failed")
    scheduler.set_masks("waits for its mask", [b""], [], [])
    batch = scheduler.schedule()
    assert batch is not None
    assert batch.new_pages == [pages]


def test_a_request_that_built_on_a_step_that_failed_starts_again() -> None:
    simulation = Simulation(config(run_ahead=1, max_prefill_tokens=32))
    simulation.add(request("a", distinct(1, 30)))
    simulation.step(fail_read=True)
    simulation.scheduler.abort("a")
    simulation.add(request("b", distinct(1, 30)))
    simulation.run()
    assert simulation.requests["b"].finish_reason is FinishReason.LENGTH
    simulation.check_outputs()


# -- sharing ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("run_ahead", [0, 1])
@pytest.mark.parametrize("page_size", [1, 16])
def test_equal_prompts_at_once_are_computed_once(page_size: int, run_ahead: int) -> None:
    prompt = [i % 2 for i in range(400)]
    fields = config(page_size=page_size, num_pages=1024 // page_size, context_length=600, run_ahead=run_ahead)
    simulation = Simulation(fields.replace(max_prefill_tokens=128))
    for name in range(13):
        simulation.add(request(str(name), prompt, max_tokens=20))
    simulation.run()
    assert simulation.requests["0"].num_cached_tokens == 0
    assert {simulation.requests[str(name)].num_cached_tokens for name in range(1, 13)} == {399}
    simulation.check_outputs()
    simulation.scheduler.check()


def test_without_a_cache_equal_prompts_do_not_wait_for_each_other() -> None:
    scheduler = Scheduler(config(cache="naive"))
    for name in "ab":
        scheduler.add(request(name, distinct(1, 8)))
    assert rows(scheduler.schedule()) == [(0, 8, True), (0, 8, True)]


def test_a_request_whose_beginning_is_being_computed_does_not_hold_up_others() -> None:
    scheduler = Scheduler(config(max_prefill_tokens=32))
    scheduler.add(request("first", distinct(1, 30)))
    scheduler.add(request("same", distinct(1, 30)))
    scheduler.add(request("other", [2]))
    batch = scheduler.schedule()
    assert rows(batch) == [(0, 30, True), (0, 1, True)]


def test_pages_are_found_as_soon_as_the_step_that_fills_them_was_launched() -> None:
    scheduler = Scheduler(config(max_prefill_tokens=32))
    scheduler.add(request("a", distinct(1, 20)))
    scheduler.schedule()
    scheduler.add(request("b", distinct(1, 20)))
    assert rows(scheduler.schedule()) == [(20, 1, True), (19, 1, True)]


def cached_by_counting(simulation: Simulation, page_size: int, new: Request) -> int:
    """The longest beginning of `new` that any request, running or gone, has left visible so far."""
    best = 0
    for other in simulation.requests.values():
        if other.cache_salt != new.cache_salt or other is new:
            continue
        known = other.prompt_ids + other.output_ids
        if other.finish_reason is not None:
            visible = len(known) - 1
        else:
            visible = min(other.num_computed_tokens, len(known)) // page_size * page_size
            if other.num_computed_tokens >= len(other.prompt_ids):
                visible = max(visible, len(other.prompt_ids))
        limit = min(visible, len(new.prompt_ids) - 1)
        best = max(best, next((i for i in range(limit) if known[i] != new.prompt_ids[i]), limit))
    return best


@pytest.mark.parametrize("page_size", [1, 3, 8])
@pytest.mark.parametrize("seed", range(3))
def test_reuse_is_the_longest_possible_prefix_to_the_token(page_size: int, seed: int) -> None:
    chance = random.Random(seed)
    simulation = Simulation(config(page_size=page_size, num_pages=8000, max_prefill_tokens=40, context_length=500))
    waiting: list[Request] = []
    texts: list[list[int]] = [[]]
    for number in range(120):
        text = chance.choice(texts)
        prompt = text[: chance.randint(0, len(text))] + [chance.randrange(3) for _ in range(chance.randint(1, 30))]
        salt = chance.choice([0, 0, 1])
        new = request(str(number), prompt[:300], chance.randint(1, 25), seed=salt, cache_salt=str(salt))
        simulation.add(new)
        waiting.append(new)
        for _ in range(chance.randint(0, 12)):
            expected = {each: cached_by_counting(simulation, page_size, each) for each in waiting}
            simulation.step()
            for each in [each for each in waiting if each.was_admitted]:
                assert each.num_cached_tokens == expected[each]
                waiting.remove(each)
                texts.append(each.prompt_ids + generate(each.prompt_ids, each.seed, 25, simulation.vocab_size))
    simulation.run()
    simulation.check_outputs()


def test_growing_conversations_reuse_all_but_their_new_turns() -> None:
    chance = random.Random(0)
    simulation = Simulation(config(page_size=16, num_pages=2000, context_length=2000, max_prefill_tokens=128))
    system = [chance.randrange(3) for _ in range(100)]
    history = {chat: [*system, chat % 3] for chat in range(8)}
    for turn in range(6):
        for chat, tokens in history.items():
            tokens += [chance.randrange(3) for _ in range(11)]
            simulation.add(request(f"{chat}.{turn}", tokens.copy(), max_tokens=20))
        simulation.run()
        for chat, tokens in history.items():
            tokens += simulation.requests[f"{chat}.{turn}"].output_ids
    stats = simulation.scheduler.stats()
    assert stats.num_cached_tokens / stats.num_prompt_tokens >= 0.79
    simulation.check_outputs()


# -- running out of pages ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cache", ["radix", "naive"])
@pytest.mark.parametrize("run_ahead", [0, 1, 2])
def test_preempted_requests_resume_with_the_same_text(run_ahead: int, cache: str) -> None:
    simulation = Simulation(config(num_pages=12, run_ahead=run_ahead, cache=cache))
    simulation.scheduler.expected_output = 0.0
    for name in range(6):
        simulation.add(request(str(name), distinct(name, 6), max_tokens=25))
    simulation.run(2000)
    assert simulation.scheduler.stats().num_preemptions > 0
    assert {len(each.output_ids) for each in simulation.requests.values()} == {25}
    assert simulation.scheduler.stats().num_prompt_tokens == 6 * 6  # each counts once
    simulation.check_outputs()
    simulation.scheduler.check()


def after_a_preemption() -> Scheduler:
    """Two requests fill the pool; the step that was scheduled last, and not read, took the pages of the second."""
    scheduler = Scheduler(config(num_pages=6))
    scheduler.expected_output = 0.0
    for name in "ab":
        scheduler.add(Request(name, distinct(ord(name), 6), SamplingParams(max_tokens=8, prompt_logprobs=0)))
    while True:
        batch = scheduler.schedule()
        assert batch is not None
        if scheduler.stats().num_preemptions:
            return scheduler
        read(scheduler, batch)


def test_a_step_names_those_preempted_for_it() -> None:
    scheduler = after_a_preemption()
    assert scheduler.latest_step.preempted == ["b"]
    read(scheduler, scheduler.latest_step.batch)
    scheduler.schedule()
    assert scheduler.latest_step.preempted == []


def test_a_request_that_gives_way_while_a_step_is_under_way_is_in_no_other() -> None:
    scheduler = Scheduler(config(num_pages=6))
    scheduler.expected_output = 0.0
    scheduler.add(request("a", distinct(1, 6)))
    scheduler.add(request("b", distinct(2, 5)))  # has room on its page when a begins another
    unread = scheduler.schedule()
    batch = scheduler.schedule()
    while not scheduler.stats().num_preemptions:
        assert unread is not None
        read(scheduler, unread)
        unread, batch = batch, scheduler.schedule()
    assert batch is None  # a waits for the pages that b holds until the step under way was read


def test_a_resumed_request_does_not_ask_again_for_what_it_was_given() -> None:
    scheduler = after_a_preemption()
    batch = scheduler.latest_step.batch
    while not batch.new_requests:
        read(scheduler, batch)
        following = scheduler.schedule()
        assert following is not None
        batch = following
    (resumed,) = batch.new_requests
    assert (resumed.num_prompt_tokens, resumed.token_ids[:6]) == (6, distinct(ord("b"), 6))
    assert resumed.params.prompt_logprobs is None


def test_a_planned_request_that_gives_way_is_not_in_the_step() -> None:
    simulation = Simulation(config(num_pages=12, max_prefill_tokens=5, schedule="priority", run_ahead=0))
    simulation.scheduler.expected_output = 0.0
    simulation.add(request("stream", distinct(1, 4), max_tokens=40))
    simulation.step()
    simulation.add(request("long", distinct(2, 36), max_tokens=1, priority=-1))
    simulation.run()
    assert simulation.scheduler.stats().num_preemptions == 1
    simulation.check_outputs()


def test_a_page_exchanged_between_two_steps_is_free_at_once() -> None:
    scheduler = Scheduler(config(page_size=1))
    scheduler.expected_output = 0.0
    for name in "ab":
        scheduler.add(Request(name, [0], SamplingParams(regex="a*")))
    for _ in range(2):  # the second step computes the same token for both of them
        scheduler.set_masks("a", [b""], [], [])
        scheduler.set_masks("b", [b""], [], [])
        batch = scheduler.schedule()
        assert batch is not None
        assert len(batch.rows) == 2
        read(scheduler, batch)
    scheduler.add(request("c", [9]))
    free = scheduler.stats().num_free_pages
    scheduler.schedule()
    assert scheduler.kv.num_returning_pages == 0
    assert scheduler.stats().num_free_pages == free - 1 + 1  # one for c, one that was exchanged


def test_a_preempted_request_can_be_aborted_while_it_waits() -> None:
    scheduler = after_a_preemption()
    scheduler.abort("b")
    scheduler.check()
    assert (scheduler.stats().num_waiting, scheduler.stats().num_aborted) == (0, 1)


@pytest.mark.parametrize("pool", range(6, 12))
def test_a_page_exchanged_while_no_step_is_under_way_comes_back_at_once(pool: int) -> None:
    """With grammars there are moments when nobody may be in a step: nobody may wait for one to be read then either."""
    simulation = Simulation(
        config(page_size=1, num_pages=pool, max_running_requests=4, run_ahead=0), vocab_size=3, mask_delay=1
    )
    simulation.scheduler.expected_output = 0.0
    for name in ("a", "b", "c"):  # a and b compute equal pages; c makes the scheduler publish them
        params = SamplingParams(regex="a*")
        simulation.add(Request(name, [1 if name == "c" else 0], params))
    simulation.run(max_steps=600)
    simulation.check_outputs()


def test_the_last_arrived_gives_way_and_the_first_is_never_preempted() -> None:
    simulation = Simulation(config(num_pages=12))
    simulation.scheduler.expected_output = 0.0
    for name in range(3):
        simulation.add(request(str(name), distinct(name, 6), max_tokens=30))
    first, ended = simulation.requests["0"], []
    while simulation.scheduler.has_work:
        before = len(first.output_ids)
        outputs = simulation.step()
        assert first.finish_reason is not None or len(first.output_ids) == before + 1 or before == 0
        ended += [output.request_id for output in outputs if output.finish_reason]
    assert ended == ["0", "1", "2"]
    assert simulation.scheduler.stats().num_preemptions > 0


def test_answers_of_the_usual_length_are_a_running_mean_of_those_that_ended_by_themselves() -> None:
    simulation = Simulation(config())
    simulation.scheduler.expected_output = 100.0
    simulation.add(request("short", [1], max_tokens=4))
    simulation.add(request("aborted", [2]))
    simulation.step()
    simulation.scheduler.abort("aborted")
    simulation.run()
    assert simulation.scheduler.expected_output == 100.0 - (100.0 - 4) / 16


def test_admission_expects_answers_of_the_usual_length() -> None:
    simulation = Simulation(config(num_pages=40))
    for name in range(8):  # each would fill 25 pages if it ran to its limit, but such answers have been short
        simulation.add(request(f"warm {name}", distinct(name, 4), max_tokens=2))
    simulation.run()
    simulation.scheduler.expected_output = 2.0
    for name in range(8):
        simulation.add(request(str(name), distinct(name + 10, 4), max_tokens=100))
    simulation.step()
    assert simulation.scheduler.stats().num_running == 4  # the budget of one step
    simulation.step()
    assert simulation.scheduler.stats().num_running == 7


def test_answers_that_do_not_fit_together_are_not_begun_together() -> None:
    scheduler = Scheduler(config(num_pages=10))
    scheduler.expected_output = 16.0
    for name in range(4):  # each will hold five pages
        scheduler.add(request(str(name), distinct(name, 4), max_tokens=30))
    scheduler.schedule()
    assert scheduler.latest_step.admitted == ["0", "1"]


def test_a_request_alone_does_not_wait_for_the_pages_of_one_that_leaves() -> None:
    scheduler = Scheduler(config(num_pages=8, max_prefill_tokens=32))
    scheduler.add(request("leaves", distinct(1, 20)))
    scheduler.schedule()
    scheduler.abort("leaves")
    scheduler.add(request("alone", distinct(2, 4), max_tokens=100))
    scheduler.schedule()
    assert scheduler.latest_step.admitted == ["alone"]


def test_a_prompt_whose_beginning_somebody_has_computed_fits_as_soon_as_that_is_so() -> None:
    scheduler = Scheduler(config(num_pages=12))
    scheduler.expected_output = 0.0
    scheduler.add(request("a", distinct(1, 8), max_tokens=50))
    scheduler.add(request("b", distinct(1, 8) + distinct(2, 30), max_tokens=50))
    scheduler.schedule()
    assert scheduler.latest_step.admitted == ["a"]
    scheduler.schedule()
    assert scheduler.latest_step.admitted == ["b"]


def test_a_queue_that_found_no_pages_is_not_searched_again_until_something_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scheduler = Scheduler(config(num_pages=8))
    scheduler.expected_output = 0.0
    scheduler.add(request("a", distinct(1, 4), max_tokens=20))
    scheduler.schedule()
    scheduler.add(request("large", distinct(2, 30), max_tokens=1))
    searched, find = [], scheduler.kv.match

    def match(request: Request) -> Match:
        searched.append(request.request_id)
        return find(request)

    monkeypatch.setattr(scheduler.kv, "match", match)
    for _ in range(5):
        scheduler.schedule()
    assert searched == ["large"]
    scheduler.abort("a")
    scheduler.add(request("b", distinct(1, 1)))
    scheduler.schedule()
    assert searched[1:] == ["large"]


def test_lpm_passes_over_the_oldest_request_a_bounded_number_of_times() -> None:
    simulation = Simulation(config(schedule="lpm", max_running_requests=1, num_pages=200))
    simulation.add(request("warm", distinct(1, 8), max_tokens=1))
    simulation.run()
    simulation.add(request("oldest", distinct(2, 8), max_tokens=1))
    for number in range(MAX_OVERTAKEN + 8):
        simulation.add(request(str(number), [*distinct(1, 8), number], max_tokens=1))
    simulation.run()
    assert list(simulation.finished).index("oldest") == MAX_OVERTAKEN + 1


def test_waiting_tokens_and_the_sizes_of_steps_are_counted() -> None:
    scheduler = Scheduler(config(max_running_requests=1, max_prefill_tokens=16))
    scheduler.add(request("a", distinct(1, 20), max_tokens=4))
    scheduler.add(request("b", distinct(2, 7)))
    assert scheduler.stats().num_waiting_tokens == 20 + 7
    assert scheduler.stats().step_sizes == [0] * (len(STEP_SIZES) + 1)
    for size in (16, 4, 1):
        batch = scheduler.schedule()
        assert batch is not None
        assert batch.num_tokens == size
        read(scheduler, batch)
    stats = scheduler.stats()
    assert (stats.num_waiting_tokens, stats.num_steps, stats.num_step_tokens) == (7, 3, 21)
    counted = {size: count for size, count in zip(STEP_SIZES, stats.step_sizes, strict=False) if count}
    assert counted == {1: 1, 8: 1, 16: 1}  # each by the least bound that holds it


def test_a_newcomer_that_fits_runs_while_one_before_it_waits_for_pages() -> None:
    scheduler = Scheduler(config(num_pages=8, schedule="priority"))
    scheduler.expected_output = 0.0
    scheduler.add(request("a", distinct(1, 4), max_tokens=20))
    scheduler.schedule()
    scheduler.add(request("large", distinct(2, 30), max_tokens=1))
    scheduler.schedule()
    assert scheduler.stats().num_waiting == 1
    scheduler.add(request("small", [3], priority=-1))
    scheduler.schedule()
    assert scheduler.latest_step.admitted == ["small"]


# -- figures ----------------------------------------------------------------------------------------------------------


def test_gauges_return_to_zero_without_a_step() -> None:
    simulation = Simulation(config(max_running_requests=8))
    for name in range(20):
        simulation.add(request(str(name), distinct(name, 5)))
    simulation.step()
    for name in range(20):
        simulation.scheduler.abort(str(name))
    stats = simulation.scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_used_pages) == (0, 0, 0)
    assert stats.num_aborted == 20
    assert stats.num_free_pages + stats.num_cached_pages == stats.num_pages


def test_flushing_forgets_what_no_running_request_holds() -> None:
    simulation = Simulation(config())
    simulation.add(request("a", distinct(1, 12), max_tokens=1))
    simulation.run()
    assert simulation.scheduler.flush_cache() == 3
    assert simulation.scheduler.stats().num_free_pages == 64


FAULTS: dict[str, Callable[[Scheduler], object]] = {
    "page . counts . holders": lambda scheduler: scheduler._running[0].page_ids.pop(),
    r"slots are lost or given twice: \[0, 1\]": lambda scheduler: scheduler._free_slots.pop(),
    r"slots are lost or given twice: \[0, 0, 1, 2\]": lambda scheduler: scheduler._free_slots.append(0),
    r"requests neither wait, run nor leave: \['c'\]": lambda scheduler: scheduler._waiting.pop(0),
    "the waiting requests are not in order": lambda scheduler: scheduler._waiting.reverse(),
    "the running requests are not in order": lambda scheduler: scheduler._running.reverse(),
    "request a is not in step 9, or in a later one too": lambda s: setattr(s._running[0], "last_step", 9),
    "request a is not in step 0, or in a later one too": lambda s: setattr(s._running[0], "last_step", 0),
    "request a has computed 8 tokens; 1 are to come": lambda s: setattr(s._running[0], "num_computed_tokens", 8),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_check_finds_each_fault(fault: str) -> None:
    scheduler = Scheduler(config(max_running_requests=3, max_prefill_tokens=12))
    for name in "abcd":
        scheduler.add(request(name, distinct(ord(name), 6)))
    scheduler.schedule()  # a and b
    scheduler.check()
    FAULTS[fault](scheduler)
    with pytest.raises(RuntimeError, match=fault):
        scheduler.check()


def test_unresolved_settings_are_refused() -> None:
    with pytest.raises(TypeError, match="num_pages"):
        ResolvedConfig()  # type: ignore[call-arg]


@pytest.mark.parametrize("schedule", ["fcfs", "lpm", "priority"])
def test_a_client_that_floods_does_not_hold_up_another(schedule: str) -> None:
    simulation = Simulation(config(num_pages=200, max_running_requests=2, schedule=schedule))
    flood = [request(f"a{i}", distinct(i, 20), client="a") for i in range(60)]
    for each in flood:
        simulation.add(each)
    for _ in range(30):
        simulation.step()
    simulation.add(request("b", distinct(90, 20), client="b"))
    served_before = len(simulation.finished)
    while "b" not in simulation.finished:
        simulation.step()
    assert len(simulation.finished) - served_before <= 4
    simulation.run()
    simulation.scheduler.check()


def test_clients_with_work_get_as_many_tokens_as_each_other() -> None:
    simulation = Simulation(config(num_pages=400, max_running_requests=4, context_length=200))
    for i in range(60):
        simulation.add(request(f"long{i}", distinct(i, 80), max_tokens=40, client="long"))
        for j in range(4):
            simulation.add(request(f"short{i}-{j}", distinct(100 + 4 * i + j, 20), max_tokens=10, client="short"))
    tokens = dict.fromkeys(("long", "short"), 0)
    while len(simulation.finished) < 150:
        simulation.step()
    for name in simulation.finished:
        each = simulation.requests[name]
        tokens[each.client] += len(each.token_ids)
    assert 0.9 < tokens["long"] / tokens["short"] < 1.1


def test_a_client_that_got_a_short_answer_is_expected_to_get_short_ones() -> None:
    simulation = Simulation(config(max_running_requests=1))
    simulation.add(request("short", distinct(1, 4), max_tokens=1, client="brief"))
    simulation.run()
    for i, name in enumerate(["new 1", "new 2", "brief 1", "brief 2"]):
        simulation.add(request(name, distinct(2 + i, 4), max_tokens=150, client=name.split()[0]))
    simulation.run()
    assert list(simulation.finished) == ["short", "new 1", "brief 1", "brief 2", "new 2"]


# -- the time of a step -----------------------------------------------------------------------------------------------

COST = StepCost(step=4000, decode=20, context=0.04, token=25, pair=0.001)


def served(**fields: object) -> Simulation:
    settings = {"max_step_ms": 20, "max_prefill_tokens": 8192, "num_pages": 20_000, "context_length": 50_000}
    return Simulation(config(**{"page_size": 16, **settings, **fields}), cost=COST)


def step_us(simulation: Simulation) -> float:
    """What the next step takes by COST."""
    simulation.step()
    return COST.predict(work_of(simulation.scheduler.latest_step.batch.rows))


def test_a_prompt_alone_takes_as_many_tokens_as_the_budget_allows() -> None:
    simulation = served(run_ahead=1)
    simulation.add(request("a", distinct(1, 8000)))
    simulation.step()
    assert rows(simulation.scheduler.latest_step.batch) == [(0, 8000, True)]


def test_beside_a_stream_no_step_is_predicted_to_take_longer_than_allowed() -> None:
    simulation = served(run_ahead=1)
    simulation.add(request("stream", distinct(1, 4), max_tokens=1000))
    simulation.step()
    for name in range(20):
        simulation.add(request(f"prompt {name}", distinct(name + 2, 300 + 200 * name), max_tokens=100))
    took = [step_us(simulation) for _ in range(40)]
    assert max(took) <= 20_000
    assert sorted(took)[20] > 19_000  # and what is allowed is used


@pytest.mark.parametrize(("run_ahead", "mask_delay"), [(1, 0), (1, 3), (2, 1)])
def test_beside_a_stream_whose_mask_is_late_no_step_takes_longer_either(run_ahead: int, mask_delay: int) -> None:
    """Under a grammar a stream skips steps: what they compute holds up its next token as much as what its own do."""
    simulation = served(run_ahead=run_ahead)
    simulation.mask_delay = mask_delay
    simulation.add(Request("stream", distinct(1, 4), SamplingParams(max_tokens=1000, regex="a*"), seed=0))
    while simulation.scheduler.stats().num_generated_tokens < 2:
        simulation.step()
    for name in range(20):
        simulation.add(request(f"prompt {name}", distinct(name + 2, 1500 + 200 * name), max_tokens=1))
    assert all(step_us(simulation) <= 20_000 for _ in range(100))


def test_beside_streams_that_take_all_the_time_a_prompt_gets_half_as_much() -> None:
    simulation = served(max_step_ms=1, run_ahead=1)
    for name in range(50):
        simulation.add(request(f"stream {name}", distinct(name, 100), max_tokens=1000))
    simulation.step()
    decodes = step_us(simulation)
    simulation.add(request("prompt", distinct(99, 2000), max_tokens=1))
    assert decodes * 1.4 < step_us(simulation) <= decodes * 1.51


def test_short_prompts_pass_a_long_one_that_goes_on_beside_them() -> None:
    simulation = served(run_ahead=1)
    simulation.add(request("stream", distinct(1, 4), max_tokens=3000))
    simulation.step()
    simulation.add(request("long", distinct(2, 40_000), max_tokens=1))
    alone = steps_until(simulation, "long", short_prompts=0)
    assert simulation.finished.pop("long") is FinishReason.LENGTH
    simulation.add(request("long", distinct(3, 40_000), max_tokens=1))
    assert steps_until(simulation, "long", short_prompts=1) <= 2 * alone + 2
    waited = [name for name in simulation.requests if name.startswith("short") and name not in simulation.finished]
    assert len(waited) <= 3  # the last steps have not been read


def steps_until(simulation: Simulation, name: str, short_prompts: int) -> int:
    """How many steps a request takes while as many prompts of 250 tokens arrive at each of them."""
    for step in range(3000):
        if name in simulation.finished:
            return step
        for index in range(short_prompts):
            simulation.add(request(f"short {step} {index}", distinct(10 + step, 250), max_tokens=1))
        simulation.step()
    raise AssertionError("it does not end")
