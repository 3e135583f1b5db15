"""Speculation: what an n-gram proposes, what the gate lets through, and what becomes of it in steps."""

from __future__ import annotations

import itertools

import pytest

from mini_sglang.bench.traces import TraceRow
from mini_sglang.config import ResolvedConfig
from mini_sglang.request import Request
from mini_sglang.sampling_params import SamplingParams
from mini_sglang.scheduling.batch import MOST_VERIFIED, StepResult
from mini_sglang.scheduling.scheduler import Scheduler
from mini_sglang.scheduling.simulation import Simulation, generate
from mini_sglang.scheduling.speculation import LONGEST_PAUSE, Gate, InVocabulary, NgramProposer, make_gate
from mini_sglang.scheduling.step_cost import StepCost

CHEAP_TOKENS = StepCost(step=10_000, decode=10, context=0.001, token=10, pair=0.001)
DEAR_TOKENS = StepCost(step=10, decode=1000, context=0.001, token=1000, pair=0.001)


def request(prompt: list[int], output: list[int] | None = None) -> Request:
    made = Request("a", prompt, SamplingParams(max_tokens=50))
    made.output_ids = output or []
    made.num_computed_tokens = made.num_known_tokens - 1
    made.max_num_tokens = made.num_known_tokens + 50
    return made


class Fixed:
    """Always proposes the same."""

    def __init__(self, *draft: int) -> None:
        self.draft = list(draft)

    def propose(self, request: Request, most: int) -> list[int]:
        return self.draft[:most]

    def forget(self, request: Request) -> None:
        pass


# -- n-grams -----------------------------------------------------------------------------------------------------------


def test_what_followed_the_last_tokens_before_is_proposed() -> None:
    assert NgramProposer().propose(request([1, 2, 3, 4, 5, 9, 2, 3]), 3) == [4, 5, 9]


def test_the_longest_match_counts_and_of_several_the_latest() -> None:
    assert NgramProposer().propose(request([7, 1, 2, 3, 8, 1, 2, 4, 7, 1, 2]), 1) == [3]
    assert NgramProposer().propose(request([1, 2, 3, 1, 2, 4, 1, 2]), 1) == [4]


def test_what_never_stood_before_proposes_nothing() -> None:
    assert NgramProposer().propose(request([1, 2, 3, 4]), 3) == []
    assert NgramProposer().propose(request([5]), 3) == []


def test_a_loop_goes_on() -> None:
    assert NgramProposer().propose(request([1, 2, 3, 1, 2, 3, 1, 2]), 7) == [3, 1, 2, 3, 1, 2, 3]


def test_the_answer_is_looked_through_as_it_grows() -> None:
    proposer, growing = NgramProposer(), request([1, 2], [3, 4])
    assert proposer.propose(growing, 2) == []
    growing.output_ids += [1, 2]
    assert proposer.propose(growing, 2) == [3, 4]


# -- the gate ----------------------------------------------------------------------------------------------------------


def test_more_is_drafted_the_more_is_accepted() -> None:
    cost = StepCost(step=10_000, decode=100, context=0.001, token=100, pair=0.001)
    gate, running = Gate(Fixed(*range(8)), 8, cost), request([1] * 20)
    [before] = gate.draft({running: 1}, [running]).values()
    for _ in range(20):
        gate.verified(running, 8, 8)
    [after] = gate.draft({running: 1}, [running]).values()
    assert len(before) < len(after) == 8
    for _ in range(30):
        gate.verified(running, 1, 0)
    assert len(gate.draft({running: 1}, [running]).get(running, [])) <= 1


def test_nothing_is_drafted_where_a_token_costs_as_much_as_it_saves() -> None:
    running = request([1] * 20)
    assert Gate(Fixed(1, 2), 8, DEAR_TOKENS).draft({running: 1}, [running]) == {}
    assert Gate(Fixed(1, 2), 8, DEAR_TOKENS, always=True).draft({running: 1}, [running]) == {running: [1, 2]}


def test_less_is_drafted_beside_many_that_need_no_drafts() -> None:
    cost = StepCost(step=10_000, decode=10, context=0.001, token=200, pair=0.001)
    many = [request([1] * 20) for _ in range(200)]
    [alone] = Gate(Fixed(*range(8)), 8, cost).draft({many[0]: 1}, many[:1]).values()
    beside = Gate(Fixed(*range(8)), 8, cost).draft(dict.fromkeys(many, 1), many[:1])
    assert len(beside.get(many[0], [])) < len(alone)


def test_a_token_that_was_proposed_and_not_verified_counts_once_it_is_known() -> None:
    gate, running = Gate(Fixed(7, 7), 8, DEAR_TOKENS), request([1] * 20)
    assert gate.draft({running: 1}, [running]) == {}
    before = gate._records[running].acceptance
    running.output_ids.append(7)
    gate.draft({running: 1}, [running])
    assert gate._records[running].acceptance > before


@pytest.mark.parametrize("draft", [(), (7,)], ids=["nothing to propose", "nothing that pays"])
def test_a_request_whose_drafts_do_not_pay_waits_for_them_ever_less_often(draft: tuple[int, ...]) -> None:
    gate, running = Gate(Fixed(*draft), 8, DEAR_TOKENS, hesitates=True), request([1] * 20)
    waited = []
    for _ in range(200):
        if gate.is_due(running):
            waited.append(len(running.output_ids))
            gate.draft({running: 1}, [running])
        running.output_ids.append(0)
    pauses = [later - earlier for earlier, later in itertools.pairwise(waited)]
    assert pauses == sorted(pauses)
    assert pauses[-1] == LONGEST_PAUSE


def under_grammar(draft: list[int], forced: list[bool]) -> Request:
    made = Request("a", [1] * 20, SamplingParams(max_tokens=50, regex="a*"))
    made.num_computed_tokens, made.max_num_tokens = 19, 70
    made.draft, made.forced = draft, forced
    return made


@pytest.mark.parametrize(
    ("token_us", "forced", "length"),
    [(70, [False, False], 0), (70, [False, True], 0), (70, [True, True, True, False], 3), (120, [True, True], 0)],
)
def test_what_a_grammar_forces_pays_where_guesses_do_not(token_us: int, forced: list[bool], length: int) -> None:
    """In 70 us a step makes 0.64 tokens: more than a guess brings, which is right half of the time."""
    cost = StepCost(step=10, decode=100, context=0.001, token=token_us, pair=0.001)
    running = under_grammar([7] * len(forced), forced)
    assert len(Gate(Fixed(), 8, cost).draft({running: 1}, [running]).get(running, [])) == length


def test_what_a_grammar_forces_says_nothing_of_the_proposer() -> None:
    gate, running = Gate(Fixed(), 8, CHEAP_TOKENS), under_grammar([7, 7, 8], [True, True, False])
    gate.draft({running: 1}, [running])
    before = gate._records[running].acceptance
    gate.verified(running, 2, 2)
    assert gate._records[running].acceptance == before
    gate.verified(running, 3, 2)
    assert gate._records[running].acceptance < before


def test_no_masks_are_asked_for_along_guesses_that_do_not_pay() -> None:
    """But where guesses are left out, what a grammar forces is looked for, until that does not pay either."""
    gate, running = Gate(Fixed(7, 8), 8, DEAR_TOKENS), under_grammar([], [])
    assert gate.propose(running) == [7, 8]
    gate.draft({running: 1}, [running])
    assert gate.propose(running) == []
    for _ in range(60):  # what would have come of the guesses is followed all the same
        running.output_ids.append(7)
        gate.propose(running)
    assert gate._records[running].acceptance > 0.95
    costly = StepCost(step=10, decode=100, context=0.001, token=120, pair=0.001)
    gate, running = Gate(Fixed(7), 8, costly), under_grammar([9], [True])
    gate.draft({running: 1}, [running])
    assert gate.propose(running) is None


def test_guesses_pay_again_once_the_others_have_ended() -> None:
    cost = StepCost(step=10_000, decode=10, context=0.001, token=200, pair=0.001)
    gate, running = Gate(Fixed(7, 8), 8, cost), under_grammar([], [])
    many = [running, *(request([1] * 20) for _ in range(200))]
    gate.draft(dict.fromkeys(many, 1), [running])
    assert gate.propose(running) == []
    gate.draft({running: 1}, [running])
    assert gate.propose(running) == [7, 8]


def test_a_gate_comes_with_the_setting() -> None:
    config = ResolvedConfig(num_pages=8, context_length=32, max_running_requests=1, max_prefill_tokens=8)
    assert make_gate(config, CHEAP_TOKENS, 100) is None
    assert make_gate(config.replace(speculative="ngram"), CHEAP_TOKENS, 100) is not None


@pytest.mark.parametrize(
    ("draft", "kept"), [([5, 99, 6], [5, 99, 6]), ([5, 100, 6], [5]), ([-1], []), ([5] * 9, [5] * 4)]
)
def test_a_draft_ends_before_a_token_that_the_model_does_not_have(
    draft: list[int], kept: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    proposer = InVocabulary(Fixed(*draft), 100)
    for _ in range(2):
        assert proposer.propose(request([1]), 4) == kept
    warnings = [record.message for record in caplog.records]
    bad = [token_id for token_id in draft if not 0 <= token_id < 100]
    assert len(warnings) == len(bad), "it is said once"
    assert all(f"proposer Fixed drafts token {bad[0]}, but token ids are between 0 and 99" in one for one in warnings)


# -- in steps ----------------------------------------------------------------------------------------------------------


def make_scheduler(
    draft: list[int], *, num_pages: int = 64, max_running_requests: int = 4, max_prefill_tokens: int = 64
) -> Scheduler:
    config = ResolvedConfig(
        page_size=4,
        num_pages=num_pages,
        context_length=100,
        max_running_requests=max_running_requests,
        max_prefill_tokens=max_prefill_tokens,
    )
    return Scheduler(config, CHEAP_TOKENS, gate=Gate(Fixed(*draft), 8, CHEAP_TOKENS, always=True))


def step(scheduler: Scheduler, *token_ids: int) -> list[tuple[str, list[int]]]:
    """One step that samples these tokens; returns what requests gained."""
    batch = scheduler.schedule()
    assert batch is not None
    outputs = scheduler.update(batch, StepResult(list(token_ids), [None] * len(token_ids)))
    scheduler.check()
    return [(output.request_id, output.token_ids) for output in outputs]


def running(scheduler: Scheduler, prompt: list[int], **fields: object) -> Request:
    """A request whose first token, 9, is known."""
    made = Request("a", prompt, SamplingParams(max_tokens=20), **fields)  # type: ignore[arg-type]
    scheduler.add(made)
    step(scheduler, 9)
    return made


def test_accepted_tokens_and_the_one_behind_them_come_in_one_output() -> None:
    scheduler = make_scheduler([5, 6, 7])
    made = running(scheduler, [1, 2, 3])
    batch = scheduler.schedule()
    assert batch is not None
    [row] = batch.rows
    assert (row.start, row.count, row.samples) == (3, 4, 4)
    assert batch.drafts == {row.slot: [5, 6, 7]}
    outputs = scheduler.update(batch, StepResult([5, 6, 8, 4], [None] * 4))
    assert [(output.request_id, output.token_ids) for output in outputs] == [("a", [5, 6, 8])]
    assert made.num_computed_tokens == made.num_known_tokens - 1 == 6
    drafts = scheduler.stats().drafts
    assert drafts is not None
    assert (drafts.num_drafts, drafts.num_draft_tokens, drafts.num_accepted_at[:3]) == (1, 3, [1, 1, 0])


def test_pages_of_rejected_tokens_come_back() -> None:
    scheduler = make_scheduler([5] * 8)
    made = running(scheduler, [1, 2, 3])
    step(scheduler, *[0] * 9)
    assert (made.output_ids, len(made.page_ids)) == ([9, 0], 1)


@pytest.mark.parametrize("place", range(4))
def test_an_end_token_ends_the_answer_wherever_it_stands_in_the_run(place: int) -> None:
    draft = [5, 5, 5]
    draft[place:] = [2] * (3 - place)
    scheduler = make_scheduler(draft)
    made = running(scheduler, [1, 2, 3], eos_token_ids=frozenset([2]))
    sampled = [5] * place + [2] * (4 - place)
    assert step(scheduler, *sampled) == [("a", [5] * place + [2])]
    assert made.finish_reason is not None
    assert not scheduler.has_work


def test_an_answer_never_gets_longer_than_it_may() -> None:
    scheduler = make_scheduler([5] * 8)
    made = Request("a", [1, 2, 3], SamplingParams(max_tokens=4))
    scheduler.add(made)
    step(scheduler, 9)
    assert step(scheduler, 5, 5, 5) == [("a", [5, 5, 5])]
    assert made.output_ids == [9, 5, 5, 5]
    assert not scheduler.has_work


def test_rejected_tokens_are_never_in_the_cache() -> None:
    scheduler = make_scheduler([5] * 8)
    running(scheduler, [1, 2, 3])
    step(scheduler, *[0] * 9)
    scheduler.abort("a")
    again = Request("b", [1, 2, 3, 9, 5, 5, 5, 5], SamplingParams(max_tokens=1))
    scheduler.add(again)
    step(scheduler, 0)
    assert again.num_cached_tokens == 4


def constrained(scheduler: Scheduler) -> Request:
    """A running request with a grammar, whose first token, 9, is known."""
    made = Request("a", [1, 2, 3], SamplingParams(max_tokens=20, regex="a*"))
    scheduler.add(made)
    scheduler.set_masks("a", [b"first"], [], [])
    assert step(scheduler, 9) == [("a", [9])]
    return made


def test_what_a_grammar_leaves_of_a_draft_is_verified_under_a_mask_for_each_token() -> None:
    scheduler = make_scheduler([5, 6, 7])
    made = constrained(scheduler)
    assert scheduler.propose("a") == [5, 6, 7]
    assert scheduler.schedule() is None, "it waits for its masks"
    scheduler.set_masks("a", [b"x", b"y", b"z"], [5, 8], [False, True])
    batch = scheduler.schedule()
    assert batch is not None
    [row] = batch.rows
    assert (row.samples, batch.drafts, batch.masks) == (3, {row.slot: [5, 8]}, {row.slot: [b"x", b"y", b"z"]})
    outputs = scheduler.update(batch, StepResult([5, 8, 3], [None] * 3))
    assert [output.token_ids for output in outputs] == [[5, 8, 3]]
    assert made.output_ids == [9, 5, 8, 3]
    assert not made.may_sample, "the masks behind are not known"


def test_a_draft_that_has_no_room_takes_its_masks_along() -> None:
    scheduler = make_scheduler([5, 6, 7], max_prefill_tokens=3)
    constrained(scheduler)
    scheduler.set_masks("a", [b"x", b"y", b"z", b"!"], [5, 6, 7], [False] * 3)
    batch = scheduler.schedule()
    assert batch is not None
    assert (list(batch.drafts.values()), list(batch.masks.values())) == ([[5, 6]], [[b"x", b"y", b"z"]])


def test_nothing_but_what_came_with_its_masks_is_drafted_under_a_grammar() -> None:
    scheduler = make_scheduler([5, 6, 7])
    constrained(scheduler)
    scheduler.set_masks("a", [b"x"], [], [])
    batch = scheduler.schedule()
    assert batch is not None
    assert (batch.drafts, list(batch.masks.values())) == ({}, [[b"x"]])


def test_a_chunk_of_a_prompt_has_no_drafts() -> None:
    scheduler = make_scheduler([5], max_prefill_tokens=2)
    scheduler.add(Request("a", [1, 2, 3, 4], SamplingParams(max_tokens=4)))
    for _ in range(2):
        batch = scheduler.schedule()
        assert batch is not None
        assert not batch.drafts
        sampled = [1] * sum(row.samples for row in batch.rows)
        scheduler.update(batch, StepResult(sampled, [None] * len(sampled)))


def test_a_step_verifies_no_more_than_graphs_have_room_for() -> None:
    scheduler = make_scheduler([5] * 8, num_pages=4000, max_running_requests=200, max_prefill_tokens=8192)
    for index in range(200):
        scheduler.add(Request(str(index), [index, index], SamplingParams(max_tokens=30)))
    most = 0
    while scheduler.has_work:
        batch = scheduler.schedule()
        assert batch is not None
        num_samples = sum(row.samples for row in batch.rows)
        most = max(most, num_samples)
        scheduler.update(batch, StepResult([9] * num_samples, [None] * num_samples))
    assert most == MOST_VERIFIED


# -- beside the prefix cache -------------------------------------------------------------------------------------------


class Guesses:
    """Drafts what a request will get, but for every third token."""

    def propose(self, request: Request, most: int) -> list[int]:
        known = len(request.output_ids)
        answer = generate(request.prompt_ids, request.seed, known + most, vocab_size=3)[known:]
        return [(token + 1) % 3 if place % 3 == 2 else token for place, token in enumerate(answer, known)]

    def forget(self, request: Request) -> None:
        pass


def cached_tokens(rows: list[TraceRow], gate: Gate | None, *, num_pages: int, page_size: int) -> list[int]:
    """Of each turn of chats whose prompts hold the answers before; whoever asked longest ago asks next."""
    config = ResolvedConfig(
        num_pages=num_pages,
        page_size=page_size,
        context_length=200,
        max_running_requests=2,
        max_prefill_tokens=32,
    )
    simulation = Simulation(config, gate=gate)
    histories: dict[int | None, list[int]] = {}
    for number, row in enumerate(rows):
        prompt = histories.get(row.chat_id, []) + row.prompt(range(3))
        turn = Request(str(number), prompt, SamplingParams(max_tokens=row.output_length, ignore_eos=True))
        simulation.add(turn)
        simulation.run()
        histories[row.chat_id] = prompt + turn.output_ids
    simulation.check_outputs()
    drafts = simulation.scheduler.stats().drafts
    assert gate is None or (drafts is not None and 0 < drafts.num_accepted_tokens < drafts.num_draft_tokens)
    return [made.num_cached_tokens for made in simulation.requests.values()]


@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("num_tokens", [1600, 240], ids=["all fits", "chats push each other out"])
def test_chats_find_as_much_in_the_prefix_cache_as_without(page_size: int, num_tokens: int) -> None:
    turns = [(turn, chat) for turn in range(4) for chat in range(4)]
    rows = [
        TraceRow(0.0, 5 + turn + chat, 12 + 3 * chat + turn, (7, 4 * turn + chat), 6, chat_id=chat)
        for turn, chat in turns
    ]
    num_pages, gate = num_tokens // page_size, Gate(Guesses(), 4, CHEAP_TOKENS, always=True)
    found = cached_tokens(rows, gate, num_pages=num_pages, page_size=page_size)
    assert found == cached_tokens(rows, None, num_pages=num_pages, page_size=page_size)
    assert sum(found) > 0
