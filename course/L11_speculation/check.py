"""Checks of L11: n-grams, what pays, what is accepted (host, then device), in steps, and on the built-in model.

What is expected is found here by going through all places, lengths and tokens one by one.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mini_sglang.config import ResolvedConfig
from mini_sglang.execution.drafts import accept, draws, write_drafts
from mini_sglang.execution.request_table import RequestTable
from mini_sglang.execution.sampler import TorchSampler
from mini_sglang.learn.checking import LessonError, expect, expect_close, guards
from mini_sglang.llm import LLM
from mini_sglang.outputs import FinishReason, StepOutputs, TokenLogprobs
from mini_sglang.request import Request
from mini_sglang.sampling_params import SamplingParams
from mini_sglang.scheduling.batch import UNKNOWN, NewRequest, Row, ScheduledBatch, StepResult
from mini_sglang.scheduling.scheduler import Scheduler
from mini_sglang.scheduling.simulation import Simulation, WrongPageError, generate
from mini_sglang.scheduling.speculation import MOST_ACCEPTANCE, Gate, NgramProposer, _Index, _Record, verify
from mini_sglang.scheduling.step_cost import StepCost

CPU = torch.device("cpu")
CHEAP = StepCost(step=10_000, decode=10, context=0.001, token=10, pair=0.001)
LOOKUP, EXACT, RUN = "L11: Look it up", "L11: The same draw", "L11: What is left of a step"


def request(prompt: list[int], output: list[int] | None = None, name: str = "a", max_tokens: int = 50) -> Request:
    """A running request all of whose tokens but the last are computed."""
    made = Request(name, prompt, SamplingParams(max_tokens=max_tokens), output_ids=list(output or []))
    made.num_computed_tokens = made.num_known_tokens - 1
    made.max_num_tokens = len(prompt) + max_tokens
    return made


class Fixed:
    """Drafts the same for each request that it has a draft for."""

    def __init__(self, **drafts: list[int]) -> None:
        self.drafts = drafts

    def propose(self, request: Request, most: int) -> list[int]:
        return self.drafts.get(request.request_id, [])[:most]

    def forget(self, request: Request) -> None:
        pass


# -- n-grams ----------------------------------------------------------------------------------------------------------


def by_hand(tokens: list[int], most: int) -> list[int]:
    """What followed the last 4, 3 or 2 tokens the last time they stood before the end."""
    for size in (4, 3, 2):
        for end in range(len(tokens) - 1, size - 1, -1):
            if tokens[end - size : end] == tokens[len(tokens) - size :]:
                draft: list[int] = []
                while len(draft) < most:
                    draft += tokens[end:]
                return draft[:most]
    return []


@guards("finds-itself")
def test_the_last_tokens_do_not_find_themselves() -> None:
    expect(
        NgramProposer().propose(request([1, 2, 3, 4]), 3),
        [],
        "draft behind 1 2 3 4, no part of which stood there before",
        invariant="an n-gram is indexed once a token has followed it",
        read=LOOKUP,
    )


@guards("known-token-first")
def test_a_draft_begins_with_what_followed() -> None:
    expect(
        NgramProposer().propose(request([1, 2, 3, 4, 5, 9, 2, 3]), 3),
        [4, 5, 9],
        "draft behind 1 2 3 4 5 9 2 3",
        invariant="the first drafted token follows the last known one",
        read=LOOKUP,
    )


@guards("short-matches-first")
def test_the_longest_match_counts() -> None:
    expect(
        NgramProposer().propose(request([7, 1, 2, 3, 8, 1, 2, 4, 7, 1, 2]), 1),
        [3],
        "draft behind 7 1 2 3 8 1 2 4 7 1 2: 7 1 2 was followed by 3, 1 2 alone last by 4",
        read=LOOKUP,
    )


@guards("oldest-place")
def test_of_equal_matches_the_latest_counts() -> None:
    expect(
        NgramProposer().propose(request([1, 2, 3, 1, 2, 4, 1, 2]), 1),
        [4],
        "draft behind 1 2 3 1 2 4 1 2: 1 2 was followed by 3, and last by 4",
        read=LOOKUP,
    )


@guards("loop-ends")
def test_a_loop_goes_on_behind_the_last_token() -> None:
    expect(
        NgramProposer().propose(request([1, 2, 3, 1, 2, 3, 1, 2]), 7),
        [3, 1, 2, 3, 1, 2, 3],
        "7 tokens drafted behind 1 2 3 1 2 3 1 2",
        invariant="what follows ends with the last tokens, so behind them it may begin again",
        read=LOOKUP,
    )


@guards("answer-again")
def test_the_answer_is_looked_through_as_it_grows() -> None:
    rng, proposer, growing = random.Random(1), NgramProposer(), request([1, 2, 0, 1])
    for _ in range(150):
        tokens = growing.token_ids
        expect(
            proposer.propose(growing, 5),
            by_hand(tokens, 5),
            f"5 tokens drafted behind the prompt 1 2 0 1 and {len(growing.output_ids)} answered ones",
            invariant="known tokens = prompt + answer, each of them once",
            read=LOOKUP,
        )
        growing.output_ids += [rng.randrange(4) for _ in range(rng.randint(1, 4))]


@guards("all-from-the-start")
def test_each_place_is_indexed_once() -> None:
    index = _Index([1, 2, 3, 4], {})
    index.extend(range(4, 1, -1))
    index.after.clear()
    index.tokens.append(5)
    index.extend(range(4, 1, -1))
    expect(
        sorted(index.after.items()),
        [((1, 2, 3, 4), 4), ((2, 3, 4), 4), ((3, 4), 4)],
        "n-grams entered when a fifth token came, and where they were followed",
        invariant="a step costs as much as tokens are new, not as the request has",
        read=LOOKUP,
    )


def test_requests_do_not_share_what_they_have_said() -> None:
    proposer = NgramProposer()
    first, second = request([1, 2, 3, 4, 1, 2]), request([1, 2], name="b")
    got = [proposer.propose(one, 1) for one in (first, second, first)]
    expect(got, [[3], [], [3]], "drafts for two requests in turn: the second has said 1 2 alone", read=LOOKUP)


# -- what pays --------------------------------------------------------------------------------------------------------

PAYS = "L11: What pays"


@dataclass(frozen=True)
class Load:
    """A step of decodes, in which one request, with 100 computed tokens, may verify up to 8 drafted ones."""

    cost: StepCost
    others: int = 0
    forced: Sequence[bool] = ()
    draft_us: float = 0.0

    @property
    def rate(self) -> float:
        """Tokens in a microsecond."""
        return (1 + self.others) / (self.cost.us_of[0] + (1 + self.others) * self.cost.us_of[1])

    @property
    def request(self) -> Request:
        made = request([1] * 101)
        made.forced = list(self.forced)
        return made

    def least(self) -> float:
        """The chance that one more token must have."""
        return min(1.0, self.rate * (self.cost.prompt_us(100, 2) - self.cost.prompt_us(100, 1) + self.draft_us))

    def worth(self, acceptance: float) -> tuple[int, float, float]:
        guess = min(acceptance, MOST_ACCEPTANCE)
        chances = [1.0 if place < len(self.forced) and self.forced[place] else guess for place in range(8)]
        runs = [math.prod(chances[: k + 1]) for k in range(8)]
        length = next((k for k in range(8) if runs[k] < self.least()), 8)
        expected = sum(runs[:length])
        us = self.cost.prompt_us(100, 1 + length) - self.cost.us_of[1] - self.cost.us_of[2] * 100
        us += length * self.draft_us
        return (length, expected, us) if expected > self.rate * us else (0, 0.0, 0.0)


def expect_worth(acceptance: float, load: Load, what: str, rule: str) -> None:
    gate = Gate(Fixed(), 8, load.cost)
    got = gate._worth(_Record(acceptance), load.request, 8, load.rate, load.draft_us)
    wanted = load.worth(acceptance)
    expect(got[0], wanted[0], f"drafted tokens that pay {what}", invariant=rule, read=PAYS)
    expect_close(
        got, wanted, f"their number, the tokens expected and the µs they take {what}", invariant=rule, read=PAYS
    )


def test_a_token_has_to_bring_what_the_step_makes_in_its_time() -> None:
    cost = StepCost(step=10_000, decode=1000, context=1e-6, token=1000, pair=1)
    cases = (
        ("alone", Load(cost)),
        ("beside 7 others", Load(cost, 7)),
        ("alone, where to draft it takes 2 ms", Load(cost, draft_us=2000)),
        ("beside 99 others, of which each brings more in that time", Load(cost, 99, draft_us=5000)),
    )
    for what, load in cases:
        got = Gate(Fixed(), 8, cost)._least_chance(load.request, load.rate, load.draft_us)
        expect_close(
            got,
            load.least(),
            f"chance that one more token needs {what}",
            invariant="the tokens that the step makes in its time, and no more than 1",
            read=PAYS,
        )


@guards("each-as-good-as-the-first")
def test_a_token_counts_only_if_those_before_it_were_accepted() -> None:
    cost = StepCost(step=10_000, decode=1000, context=1e-6, token=1000, pair=1e-6)
    for acceptance in (0.3, 0.5, 0.7, 0.9):
        what = f"with acceptance {acceptance}, where a step takes 10 ms and a token 1"
        expect_worth(acceptance, Load(cost), what, "the k-th is accepted with chance^k")


def test_less_pays_beside_more_requests() -> None:
    cost = StepCost(step=10_000, decode=1000, context=1e-6, token=1000, pair=1e-6)
    for others in (0, 3, 7, 31):
        what = f"with acceptance 0.7 beside {others} other requests"
        rule = "a token has to bring more than the step makes in its time"
        expect_worth(0.7, Load(cost, others), what, rule)


@guards("never-in-doubt")
def test_no_guess_is_certain() -> None:
    cost = StepCost(step=500, decode=9500, context=1e-6, token=9500, pair=1e-6)
    rule = "a chance of at most MOST_ACCEPTANCE is reckoned with"
    expect_worth(1.0, Load(cost), "where every guess was accepted, and a token takes 0.95 of a step", rule)


@guards("certain-as-a-guess")
def test_what_the_grammar_forces_is_certain() -> None:
    cost = StepCost(step=10_000, decode=1000, context=1e-6, token=1000, pair=1e-6)
    for forced in ([True] * 4, [False, True, True], [True, False, True, False, True]):
        what = f"with acceptance 0.2 and a draft of which {[int(each) for each in forced]} are forced"
        expect_worth(0.2, Load(cost, forced=forced), what, "chances multiply, and that of a forced token is 1")


def test_the_time_to_draft_is_paid_too() -> None:
    cost = StepCost(step=10_000, decode=1000, context=1e-6, token=1000, pair=1e-6)
    for draft_us in (500, 2000, 9000):
        what = f"with acceptance 0.7, where a model takes {draft_us} µs for each"
        expect_worth(0.7, Load(cost, draft_us=draft_us), what, "a drafted token takes the time to draft it, too")


@guards("leaving-the-decodes-is-free")
def test_what_the_first_drafted_token_costs_counts() -> None:
    cost = StepCost(step=10_000, decode=10, context=1e-6, token=1000, pair=1e-6)
    rule = "a row that verifies is no decode any more: all its tokens are paid for"
    expect_worth(0.85, Load(cost, 7), "beside 7 others, where a decode takes 10 µs, and 1,000 in a longer row", rule)


@guards("never-drafts-again")
def test_a_draft_that_was_not_tried_is_judged_all_the_same() -> None:
    dear = StepCost(step=10, decode=1000, context=0.001, token=1000, pair=0.001)
    gate, running = Gate(Fixed(a=[7, 7]), 8, dear), request([1] * 20)
    for _ in range(30):
        gate.verified(running, 1, 0)
    for _ in range(30):
        gate.draft({running: 1}, [running])
        running.output_ids.append(7)
    acceptance = gate._record(running).acceptance
    expect(
        acceptance > 0.9,
        True,
        f"what is thought of 7, wrong long ago and right 30 times since, though never verified ({acceptance:.2f})",
        invariant="acceptance follows what was proposed, not only what was verified",
        read=PAYS,
    )


@guards("praised-for-nothing")
def test_forced_tokens_say_nothing_of_guesses() -> None:
    gate, running = Gate(Fixed(), 8, CHEAP), request([1] * 20)
    running.forced = [True, True, False]
    before = gate._record(running).acceptance
    gate.verified(running, 3, 2)
    expect_close(
        gate._record(running).acceptance,
        before * 7 / 8,
        "acceptance, when two forced tokens were right and the guess behind them wrong",
        invariant="it moves by an eighth of the error, once for each guess that was judged",
        read=PAYS,
    )


# -- what is accepted -------------------------------------------------------------------------------------------------


def verified(draft: list[int], sampled: list[int]) -> tuple[list[int], Request]:
    """What a request with 4 known tokens gains, and the request: the step was launched with the draft."""
    running = request([1, 2, 3], [9])
    start = running.num_computed_tokens
    running.num_computed_tokens, running.num_drafted = start + 1 + len(draft), len(draft)
    return verify(running, start, draft, sampled, None), running


@guards("bonus-forgotten")
def test_the_token_behind_the_accepted_ones_comes_for_free() -> None:
    cases = (([5, 6], [5, 6, 7], [5, 6, 7]), ([5, 6], [5, 8, 7], [5, 8]), ([5, 6], [4, 8, 7], [4]))
    for draft, sampled, wanted in cases:
        expect(
            verified(draft, sampled)[0],
            wanted,
            f"gained with the draft {draft}, where {sampled} was drawn",
            invariant="accepted tokens, and the one that was drawn behind them",
            read=RUN,
        )


@guards("past-the-first-mismatch")
def test_what_follows_a_wrong_token_counts_for_nothing() -> None:
    expect(
        verified([5, 6, 7], [5, 9, 7, 1])[0],
        [5, 9],
        "gained with the draft 5 6 7, where 5 9 7 1 was drawn",
        invariant="7 was drawn behind 6, which the request does not have",
        read=RUN,
    )


@guards("published-too-early")
def test_rejected_tokens_count_as_not_computed() -> None:
    for accepted in range(4):
        sampled = [5] * accepted + [8] * (4 - accepted)
        gained, running = verified([5, 5, 5], sampled)
        running.output_ids += gained
        expect(
            running.num_computed_tokens,
            running.num_known_tokens - 1,
            f"computed tokens, when {accepted} of 3 drafted ones were accepted",
            invariant="all known tokens but the last are computed, as after any step",
            read=RUN,
        )


@guards("waits-for-ever")
def test_a_request_goes_on_when_its_draft_was_read() -> None:
    running = verified([5, 6], [5, 6, 7])[1]
    expect(running.may_sample, True, "whether the request may be in the next step", read=RUN)


def test_the_gate_learns_what_came_of_a_draft() -> None:
    gate, running = Gate(Fixed(), 8, CHEAP), request([1, 2, 3], [9])
    gained = verify(running, 3, [5, 6, 7], [5, 6, 8, 4], gate)
    stats = gate.stats()
    got = (gained, stats.num_draft_tokens, stats.num_accepted_at[:4])
    expect(got, ([5, 6, 8], 3, [1, 1, 0, 0]), "gained, drafted, and accepted by place", read=RUN)


# -- on the device ----------------------------------------------------------------------------------------------------


def table_of(*requests: list[int], params: SamplingParams | None = None) -> RequestTable:
    """Slots 0, 1, … with these tokens, and as many seeds."""
    table = RequestTable(len(requests), 32, 4, CPU, idle_page=0)
    news = [
        NewRequest(slot, tokens, 1, params or SamplingParams(), seed=slot + 100) for slot, tokens in enumerate(requests)
    ]
    table.take(news)
    return table


def batch(rows: list[Row], drafts: dict[int, list[int]]) -> ScheduledBatch:
    return ScheduledBatch(1, rows, [], [], [], drafts=drafts)


MIXED = [Row(0, 3, 1, 1), Row(1, 3, 4, 4), Row(2, 0, 3, 0), Row(3, 1, 2, 2)]
MIXED_DRAFTS = {1: [5, 6, 7], 3: [8]}


@guards("over-the-last-token")
def test_drafts_stand_behind_the_known_tokens() -> None:
    table = table_of([1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3], [1, 2])
    write_drafts(table, batch(MIXED, MIXED_DRAFTS))
    expect(
        table.tokens[:4, :8].tolist(),
        [[1, 2, 3, 4, 0, 0, 0, 0], [1, 2, 3, 4, 5, 6, 7, 0], [1, 2, 3, 0, 0, 0, 0, 0], [1, 2, 8, 0, 0, 0, 0, 0]],
        "tokens of four slots, of which two have the drafts 5 6 7 and 8",
        invariant="the first of a row that verifies is the last known token",
        read=RUN,
    )


@guards("one-place-for-all", "drawn-in-reverse")
def test_each_token_is_drawn_as_if_nothing_was_drafted() -> None:
    expect(
        [(row.slot, row.start + row.count, row.samples) for row in draws(MIXED)],
        [(0, 4, 1), (1, 4, 1), (1, 5, 1), (1, 6, 1), (1, 7, 1), (3, 2, 1), (3, 3, 1)],
        "(slot, position of the token that is drawn, samples) of a plain row, one with three drafted tokens, a chunk "
        "of a prompt, and one with one drafted token",
        invariant="logits come in the order of the step's tokens; the noise is that of the position",
        read=EXACT,
    )


@guards("accepts-what-is-likely", "fresh-noise")
def test_a_draft_does_not_change_what_is_drawn() -> None:
    """100 requests with a draft of 3, of which most lose their way at some place, against one token at a time."""
    vocab, many = 6, 100
    logits = torch.randn(many, 4, vocab, generator=torch.Generator().manual_seed(3))
    params = SamplingParams(frequency_penalty=0.5)
    prompts = [[slot % vocab, 1, 2] for slot in range(many)]
    plain, drafted = table_of(*prompts, params=params), table_of(*prompts, params=params)
    one_by_one = [
        TorchSampler(plain).sample([Row(slot, 2 + k, 1, 1) for slot in range(many)], logits[:, k]).token_ids.tolist()
        for k in range(4)
    ]
    wanted = [list(of_slot) for of_slot in zip(*one_by_one, strict=True)]
    rng = random.Random(5)
    drafts = {
        slot: [t if rng.random() < 0.7 else rng.randrange(vocab) for t in wanted[slot][:3]] for slot in range(many)
    }
    step = batch([Row(slot, 2, 4, 4) for slot in range(many)], drafts)
    write_drafts(drafted, step)
    drawn = TorchSampler(drafted).sample(draws(step.rows), logits.flatten(0, 1)).token_ids.view(many, 4).tolist()
    for slot in range(many):
        right = next((k for k in range(3) if drafts[slot][k] != wanted[slot][k]), 3)
        expect(
            drawn[slot][: right + 1],
            wanted[slot][: right + 1],
            f"drawn with seed {slot + 100} and the draft {drafts[slot]}, as far as that is right",
            invariant="a draw is a function of (logits, seed, position)",
            read=EXACT,
        )


def accepted(drafts: dict[int, list[int]], rows: list[Row], drawn: list[int]) -> list[int]:
    """`num_computed` of each slot after a step."""
    table = table_of(*[[1] * 8] * len(rows))
    for row in rows:
        table.num_computed[row.slot] = row.start + row.count  # as `expand` leaves it
    accept(table, batch(rows, drafts), torch.tensor(drawn))
    return table.num_computed[: len(rows)].tolist()


@guards("device-past-the-mismatch")
def test_the_device_stops_at_the_first_wrong_token_too() -> None:
    for sampled, wanted in (([5, 6, 7, 1], 7), ([5, 6, 8, 1], 6), ([5, 9, 7, 1], 5), ([4, 6, 7, 1], 4)):
        expect(
            accepted({0: [5, 6, 7]}, [Row(0, 3, 4, 4)], sampled),
            [wanted],
            f"computed tokens of a slot that had 3 and one known, with the draft 5 6 7, where {sampled} was drawn",
            invariant="host and device count the same",
            read=RUN,
        )


@guards("results-by-row")
def test_each_row_reads_its_own_draws() -> None:
    expect(
        accepted(MIXED_DRAFTS, MIXED, [8, 5, 6, 9, 5, 8, 4]),
        [4, 6, 3, 3],
        "computed tokens of four slots: draws 8; 5 6 9 5; none; 8 4, drafts none; 5 6 7; none; 8",
        invariant="a row's draws begin behind those of the rows before it, of which each has `samples`",
        read=RUN,
    )


@guards("padding-is-a-token")
def test_a_shorter_draft_ends_where_it_ends() -> None:
    rows = [Row(0, 3, 5, 5), Row(1, 3, 2, 2)]
    expect(
        accepted({0: [5, 6, 7, 8], 1: [0]}, rows, [5, 6, 7, 8, 2, 0, 0]),
        [8, 5],
        "computed tokens with the drafts 5 6 7 8 and 0, both right",
        invariant="what pads a draft equals no token, 0 included",
        read=RUN,
    )


# -- in steps ---------------------------------------------------------------------------------------------------------


def make_scheduler(max_prefill_tokens: int = 64, **drafts: list[int]) -> Scheduler:
    config = ResolvedConfig(
        page_size=4,
        num_pages=64,
        context_length=100,
        max_running_requests=4,
        max_prefill_tokens=max_prefill_tokens,
    )
    return Scheduler(config, gate=Gate(Fixed(**drafts), 8, CHEAP, always=True))


def step(scheduler: Scheduler, *token_ids: int) -> StepOutputs:
    """One step in which these tokens are drawn."""
    scheduled = scheduler.schedule()
    assert scheduled is not None
    outputs = scheduler.update(scheduled, StepResult(list(token_ids), [None] * len(token_ids)))
    scheduler.check()
    return outputs


def running(scheduler: Scheduler, name: str = "a", ends: frozenset[int] = frozenset()) -> Request:
    """A request with the prompt 1 2 3, whose first token, 9, is known."""
    made = Request(name, [1, 2, 3], SamplingParams(max_tokens=20), eos_token_ids=ends)
    scheduler.add(made)
    step(scheduler, 9)
    return made


def gained(outputs: StepOutputs) -> dict[str, list[int]]:
    return {output.request_id: output.token_ids for output in outputs}


@guards("one-token-a-row")
def test_rows_of_a_mixed_step_get_their_own_tokens() -> None:
    scheduler = make_scheduler(b=[5, 6], c=[7])
    for name in "abc":
        scheduler.add(Request(name, [ord(name), 2, 3], SamplingParams(max_tokens=20)))
    step(scheduler, 11, 12, 13)
    expect(
        gained(step(scheduler, 21, 5, 32, 33, 7, 42)),
        {"a": [21], "b": [5, 32], "c": [7, 42]},
        "gained by three requests with the drafts none, 5 6 and 7, where 21; 5 32 33; 7 42 was drawn",
        invariant="a row has `samples` entries of the result",
        read=RUN,
    )


@guards("not-asked-for")
def test_what_a_model_drafted_is_in_the_result() -> None:
    scheduler = make_scheduler(a=[UNKNOWN] * 3, b=[6])
    for name in "ab":
        scheduler.add(Request(name, [ord(name), 2, 3], SamplingParams(max_tokens=20)))
    step(scheduler, 11, 12)
    scheduled = scheduler.schedule()
    assert scheduled is not None
    slot = scheduled.rows[0].slot
    result = StepResult([5, 6, 8, 4, 6, 7], [None] * 6, drafts={slot: [5, 6, 7]})
    expect(
        gained(scheduler.update(scheduled, result)),
        {"a": [5, 6, 8], "b": [6, 7]},
        "gained by a, whose draft 5 6 7 a model made with the step, and by b with the draft 6, where 5 6 8 4; 6 7 was "
        "drawn",
        invariant="result.drafts has what was UNKNOWN when the step was launched",
        read=RUN,
    )


@guards("pages-kept")
def test_pages_of_rejected_tokens_come_back() -> None:
    scheduler = make_scheduler(a=[5] * 8)
    made = running(scheduler)
    step(scheduler, *[8] * 9)
    expect(
        len(made.page_ids),
        1,
        "pages of 4 that a request with 4 computed tokens has, when 8 drafted ones were rejected",
        invariant="a request has the pages of its computed tokens; the next step reserves its own",
        read=RUN,
    )


@guards("goes-on-after-the-end")
def test_an_answer_ends_wherever_its_end_stands_in_a_run() -> None:
    for place in range(4):
        draft = [5] * place + [2] * (3 - place)
        scheduler = make_scheduler(a=draft)
        running(scheduler, ends=frozenset([2]))
        got = gained(step(scheduler, *draft, *([2] if place == 3 else [6])))
        what = f"gained of a run whose token {place} ends the answer"
        expect(got, {"a": [5] * place + [2]}, what, invariant="nothing follows the end", read=RUN)
        expect(scheduler.has_work, False, f"whether anything is left to do after {what}", read=RUN)


@guards("end-not-told")
def test_a_run_says_that_the_answer_has_ended() -> None:
    scheduler = make_scheduler(a=[5, 2, 2])
    running(scheduler, ends=frozenset([2]))
    [output] = step(scheduler, 5, 2, 2, 2)
    got = (output.token_ids, output.finish_reason, output.stop_token_id)
    expect(got, ([5, 2], FinishReason.STOP, 2), "a run that ends the answer, and how it ended", read=RUN)


def test_log_probabilities_stay_with_their_tokens() -> None:
    scheduler = make_scheduler(b=[5, 6])
    for name in "ab":
        scheduler.add(Request(name, [ord(name), 2, 3], SamplingParams(max_tokens=20, logprobs=0)))
    step(scheduler, 11, 12)
    scheduled = scheduler.schedule()
    assert scheduled is not None
    tokens = [21, 5, 32, 33]
    result = StepResult(tokens, [TokenLogprobs([token], [-1.0]) for token in tokens])
    got = {output.request_id: output.logprobs for output in scheduler.update(scheduled, result)}
    named = {name: [entry.token_ids[0] for entry in entries or ()] for name, entries in got.items()}
    expect(named, {"a": [21], "b": [5, 32]}, "tokens that log-probabilities of 21; 5 32 33 are given for", read=RUN)


def test_an_answer_never_gets_longer_than_it_may() -> None:
    scheduler = make_scheduler(a=[5] * 8)
    scheduler.add(Request("a", [1, 2, 3], SamplingParams(max_tokens=4)))
    step(scheduler, 9)
    expect(gained(step(scheduler, 5, 5, 5)), {"a": [5, 5, 5]}, "gained where max_tokens leaves 3", read=RUN)


def test_a_request_that_was_aborted_gains_nothing() -> None:
    scheduler = make_scheduler(a=[5, 6], b=[5, 6])
    for name in "ab":
        scheduler.add(Request(name, [ord(name), 2], SamplingParams(max_tokens=20)))
    step(scheduler, 9, 9)
    scheduled = scheduler.schedule()
    assert scheduled is not None
    scheduler.abort("a")
    outputs = scheduler.update(scheduled, StepResult([5, 6, 7, 5, 8, 9], [None] * 6))
    scheduler.check()
    expect(gained(outputs), {"b": [5, 8]}, "gained by two requests of which one was aborted meanwhile", read=RUN)


def test_what_followed_from_a_failed_step_is_void() -> None:
    """c verifies in step 3, which is launched when step 2 fails: it may have read what that has left."""
    scheduler = make_scheduler(c=[5, 6])
    launched: list[ScheduledBatch] = []
    for name, prompt in (("c", [1, 2, 3]), ("a", [4] * 8), ("b", [4] * 9)):
        scheduler.add(Request(name, prompt, SamplingParams(max_tokens=20)))
        if name == "b":  # what c has said by then is known
            scheduler.update(launched[0], StepResult([9], [None]))
        scheduled = scheduler.schedule()
        assert scheduled is not None
        launched.append(scheduled)
    scheduler.fail(launched[1], "the device fell over")
    expect([row.samples for row in launched[2].rows], [3, 1], "draws of c and b in step 3", read=RUN)
    outputs = scheduler.update(launched[2], StepResult([5, 6, 7, 8], [None] * 4))
    scheduler.check()
    expect(gained(outputs), {}, "gained of step 3", invariant="a request that starts again has no new token", read=RUN)


@guards("over-the-budget")
def test_drafts_take_what_the_step_has_left() -> None:
    scheduler = make_scheduler(10, a=[5] * 8, b=[6] * 8)
    for name in "ab":
        scheduler.add(Request(name, [ord(name), 2], SamplingParams(max_tokens=20)))
    step(scheduler, 9, 9)
    scheduled = scheduler.schedule()
    assert scheduled is not None
    expect(
        scheduled.num_tokens,
        10,
        "tokens of a step of at most 10, in which two requests have 8 drafted tokens each",
        invariant="graphs and buffers have room for max_prefill_tokens",
        read=PAYS,
    )


class Foresees:
    """Drafts what will be drawn, but for a random tenth of the tokens."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def propose(self, request: Request, most: int) -> list[int]:
        known = len(request.output_ids)
        right = generate(request.prompt_ids, request.seed, known + most, 3)[known:]
        return [token if self._rng.random() < 0.9 else (token + 1) % 3 for token in right]

    def forget(self, request: Request) -> None:
        pass


def simulated(page_size: int, gate: Gate | None) -> tuple[list[list[int]], int]:
    """Answers of 40 requests that come and go through a small pool, with every page looked at; and steps."""
    rng = random.Random(page_size)
    config = ResolvedConfig(
        page_size=page_size,
        num_pages=120 // page_size,
        context_length=100,
        max_running_requests=6,
        max_prefill_tokens=24,
    )
    simulation = Simulation(config, gate=gate)
    names = [str(index) for index in range(40)]
    for name in names:
        prompt = [rng.randrange(2) for _ in range(rng.randint(1, 20))]
        simulation.add(Request(name, prompt, SamplingParams(max_tokens=rng.randint(1, 30))))
    what = f"a random schedule with pages of {page_size}, in which every page is looked at"
    try:
        for _ in range(1000):
            if not simulation.scheduler.has_work:
                break
            simulation.step()
            simulation.scheduler.check()
    except (WrongPageError, RuntimeError) as error:
        rule = "what is cached was computed of these tokens"
        raise LessonError(str(error), "no complaint", what, rule, RUN) from error
    expect(simulation.scheduler.has_work, False, f"whether anything is left to do after {what}", read=RUN)
    return [simulation.requests[name].output_ids for name in names], simulation.scheduler.stats().num_steps


def test_answers_are_the_same_and_pages_hold_what_they_should() -> None:
    for page_size in (1, 3):
        plain, plain_steps = simulated(page_size, None)
        drafted, steps = simulated(page_size, Gate(Foresees(random.Random(1)), 4, CHEAP, always=True))
        expect(drafted, plain, f"40 answers with drafts, pages of {page_size}", read=RUN)
        expect(steps < plain_steps, True, f"fewer steps with drafts ({steps}, {plain_steps} without)", read=RUN)


# -- on the built-in model --------------------------------------------------------------------------------------------

EDIT = (
    "<|im_start|>user\nRepeat this text, but write captain instead of keeper:\n\nThe old lighthouse keeper climbed the "
    "stairs every evening. He lit the lamp, wiped the glass and wrote the weather into his book.<|im_end|>\n"
    "<|im_start|>assistant\n"
)


class Switched:
    """N-grams, when they are on."""

    def __init__(self) -> None:
        self.is_on = False
        self._proposer = NgramProposer()

    def propose(self, request: Request, most: int) -> list[int]:
        return self._proposer.propose(request, most) if self.is_on else []

    def forget(self, request: Request) -> None:
        self._proposer.forget(request)


def answers(llm: LLM, params: list[SamplingParams]) -> tuple[list[list[int]], int]:
    """Tokens of the edit with each of these, all at once, and in how many steps."""
    got: dict[str, list[int]] = {str(index): [] for index in range(len(params))}
    for name, one in zip(got, params, strict=True):
        llm.engine.add_request(name, llm.tokenizer.encode(EDIT), one)
    num_steps = 0
    while llm.engine.has_work and num_steps < 60:
        num_steps += 1
        for output in llm.engine.step():
            got[output.request_id] += output.token_ids
    llm.engine.check()
    return list(got.values()), num_steps


def test_an_edit_of_a_text_is_the_same_in_a_third_of_the_steps() -> None:
    settings = {"dtype": "float32", "num_pages": 512, "num_threads": 1}
    params = [SamplingParams(temperature=0, max_tokens=40), SamplingParams(temperature=0.8, seed=2, max_tokens=40)]
    switched = Switched()
    with LLM("smollm2-135m", proposer=switched, speculative="ngram", speculative_gate=False, **settings) as llm:
        plain, plain_steps = answers(llm, params)
        switched.is_on = True
        drafted, steps = answers(llm, params)
    for kind, ours, theirs in zip(("greedy", "sampled with a seed"), drafted, plain, strict=True):
        expect(ours, theirs, f"tokens of an edit, {kind}, with n-grams", invariant="the same text", read=EXACT)
    expect(
        3 * steps <= plain_steps,
        True,
        f"n-grams save two thirds of the steps of an edit ({steps} instead of {plain_steps})",
        read="L11: The question",
    )
