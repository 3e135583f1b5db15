"""Speculation: tokens that a cheap proposer drafts are verified together, in the step that computes the next one.

A drafted token is accepted exactly if the step draws it at its position, where the noise of a draw depends on nothing
else: so a request gets the tokens that it would get without. (Speculative decoding: Leviathan et al., arXiv 2211.17192,
who accept by ratios of probabilities; drafts from the prompt: Saxena's prompt lookup decoding, 2023.)

A proposer drafts, and the gate says how much of each draft pays: a drafted token makes the step longer, and shortens
the answer only if it is accepted. Under a grammar a draft ends where it is forbidden, and what the grammar forces is
drafted without a proposer (SGLang's jump-forward decoding). Integers and floats; no tensors and no clock.
"""

from __future__ import annotations

import itertools
import logging
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Protocol

from mini_sglang.config import ResolvedConfig
from mini_sglang.outputs import StepOutputs, TokenOutput
from mini_sglang.request import Request
from mini_sglang.scheduling.batch import MOST_VERIFIED, UNKNOWN, Row, is_unknown
from mini_sglang.scheduling.kv_cache import KVCacheManager
from mini_sglang.scheduling.stats import DraftStats
from mini_sglang.scheduling.step_cost import StepCost, Work, work_of

logger = logging.getLogger(__name__)

FIRST_ACCEPTANCE = 0.5  # of drafted tokens, before any was verified
MOST_ACCEPTANCE = 0.99  # that is reckoned with
RATE = 1 / 8  # of an acceptance's error that the next verified token corrects
SLOW_RATE = 1 / 64  # likewise, of what new requests begin with
LONGEST_PAUSE = 64  # tokens that a request goes on without drafts while they do not pay


Plan = dict[Request, int]  # number of tokens that a step computes of each request, in row order
Drafts = dict[Request, list[int]]  # of some of them, the last of those tokens: drafted ones


class Proposer(Protocol):
    """Drafts what may follow the tokens of a request."""

    def propose(self, request: Request, most: int) -> list[int]:
        """Up to `most` tokens that may follow the known ones, none if there is no reason to expect any."""
        ...

    def forget(self, request: Request) -> None:
        """Drop what is kept of a request that has ended."""
        ...


class NgramProposer:
    """Drafts what followed the last place where the request's last tokens stood before: in its prompt or its answer.

    It looks for the last `longest` tokens first, then for fewer, down to `shortest`.
    """

    def __init__(self, longest: int = 4, shortest: int = 2) -> None:
        self._sizes = range(longest, shortest - 1, -1)
        self._indices: dict[Request, _Index] = {}

    def propose(self, request: Request, most: int) -> list[int]:
        index = self._indices.get(request)
        if index is None:
            index = self._indices[request] = _Index(list(request.prompt_ids), {})
        tokens = index.tokens
        tokens += request.output_ids[len(tokens) - len(request.prompt_ids) :]
        index.extend(self._sizes)
        for size in self._sizes:
            after = index.after.get(tuple(tokens[-size:]))
            if after is not None:
                return _repeat(tokens, after, most)
        return []

    def forget(self, request: Request) -> None:
        self._indices.pop(request, None)


def _repeat(tokens: list[int], first: int, count: int) -> list[int]:
    """`count` tokens from index `first` on; behind the last one they go on as they began, as a loop does."""
    period = len(tokens) - first
    return [tokens[first + place % period] for place in range(count)]


@dataclass(slots=True)
class _Index:
    """The known tokens of a request, and where each of their n-grams was last followed by another token."""

    tokens: list[int]
    after: dict[tuple[int, ...], int]
    num_indexed: int = 0  # n-grams that end before this place are in `after`

    def extend(self, sizes: Iterable[int]) -> None:
        """Index n-grams but for those at the end, which nothing follows yet."""
        tokens = self.tokens
        for end in range(max(self.num_indexed, 1), len(tokens)):
            for size in sizes:
                if size <= end:
                    self.after[tuple(tokens[end - size : end])] = end
        self.num_indexed = len(tokens)


class InVocabulary:
    """What a proposer drafts, as far as the model has such tokens: no device could look up others.

    They are left out, with a warning the first time: like any wrong draft they cost time, and no request its answer.
    """

    def __init__(self, proposer: Proposer, vocab_size: int) -> None:
        self._proposer, self._vocab_size = proposer, vocab_size
        self._has_warned = False

    def propose(self, request: Request, most: int) -> list[int]:
        draft = self._proposer.propose(request, most)[:most]
        bad = next((place for place, token_id in enumerate(draft) if not 0 <= token_id < self._vocab_size), None)
        if bad is not None and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "proposer %s drafts token %d, but token ids are between 0 and %d: its drafts end before such a token",
                type(self._proposer).__name__,
                draft[bad],
                self._vocab_size - 1,
            )
        return draft[:bad]

    def forget(self, request: Request) -> None:
        self._proposer.forget(request)


class ModelProposer:
    """Stands for a model beside the target, which drafts on the device as much as it is asked for."""

    def propose(self, request: Request, most: int) -> list[int]:
        return [UNKNOWN] * most

    def forget(self, request: Request) -> None:
        pass


PROPOSERS: Mapping[str, Callable[[], Proposer]] = {"ngram": NgramProposer}  # any other `speculative` names a model


@dataclass(slots=True)
class _Record:
    """What the gate knows of a request."""

    acceptance: float  # of a drafted token, if those before it were accepted
    expected: tuple[int, int] = (-1, -1)  # (position, token) that was proposed and not verified
    next_try: int = 0  # known tokens from which drafts are considered again
    pause: int = 1
    last_probe: int = 0

    def is_probed(self, num_known_tokens: int) -> bool:
        """Whether to verify one token although it does not pay: else nothing more is learned of what a model drafts."""
        is_due = num_known_tokens >= self.last_probe + LONGEST_PAUSE
        if is_due:
            self.last_probe = num_known_tokens
        return is_due


class Gate:
    """Asks the proposer, and drafts as much as pays; with `always`, whatever is proposed.

    A step makes some tokens in some time. A drafted token is worth it if the tokens that it may add, its chance to be
    accepted, are more than the step makes anyway in the time that it takes. Chances are followed by request; a token
    that was proposed and not verified counts too, once the one that came is known.

    With `hesitates`, a request whose drafts do not pay is left alone for a while: it would have to wait for each step
    to be read, since nothing can be drafted behind a token that is not known. One with a grammar waits anyway, but
    masks along drafts that do not pay are not worth computing either. What is drafted for it comes with its masks:
    `propose` is asked before they are computed, and `draft` takes what they left of it and added.

    With `skips_penalised` nothing is drafted for a request with penalties, of which a GPU's sampler counts what it
    draws.
    """

    def __init__(
        self,
        proposer: Proposer,
        most: int,
        cost: StepCost,
        *,
        hesitates: bool = False,
        always: bool = False,
        skips_penalised: bool = False,
    ) -> None:
        self._proposer, self._most, self._cost = proposer, most, cost
        self._hesitates, self._always, self._skips_penalised = hesitates, always, skips_penalised
        self._records: dict[Request, _Record] = {}
        self._acceptance = FIRST_ACCEPTANCE
        self._num_drafts = self._num_draft_tokens = 0
        self._accepted_at = [0] * most
        self._rate = 0.0  # tokens that the latest step would make in a microsecond without drafts, for `propose`

    def is_due(self, request: Request) -> bool:
        """Whether drafts are to be considered once all of the request's tokens are known: it waits for that."""
        if self._skips_penalised and request.params.is_penalised:
            return False
        record = self._records.get(request)
        return record is None or request.num_known_tokens >= record.next_try

    def propose(self, request: Request) -> list[int] | None:
        """What a request with a grammar may go on with, if it is due: for its masks. None: it has no use for any.

        As much as would pay in the step before: where nothing does, no masks along guesses are computed.
        """
        if not self.is_due(request):
            return None
        record, draft = self._record(request), self._proposer.propose(request, self._most)
        if draft and is_unknown(draft):  # no masks are known along it
            return []
        if not draft or self._always:
            return draft
        least, chance = self._least_chance(request, self._rate), min(record.acceptance, MOST_ACCEPTANCE)
        length = next((place for place in range(len(draft)) if chance ** (place + 1) < least), len(draft))
        if length == 0:
            record.expected = (request.num_known_tokens, draft[0])
        return draft[:length]

    def _least_chance(self, request: Request, rate: float, draft_us: float = 0.0) -> float:
        """That a drafted token must have to be accepted, where a step makes `rate` tokens in a microsecond."""
        start = request.num_computed_tokens
        return min(rate * (self._cost.prompt_us(start, 2) - self._cost.prompt_us(start, 1) + draft_us), 1.0)

    def draft(self, plan: Mapping[Request, int], candidates: Iterable[Request]) -> dict[Request, list[int]]:
        """What each of `candidates`, whose next token `plan` computes, verifies beside it; those without are left out.

        `plan` has the number of tokens that the step computes of each request.
        """
        proposed, have_grammar = [], False
        for request in candidates:
            record = self._record(request)
            draft = request.draft if request.is_constrained else self._proposer.propose(request, self._most)
            have_grammar = have_grammar or request.is_constrained
            if draft:
                proposed.append((record, request, draft))
            elif not request.is_constrained:
                self._put_off(request, record)
        if self._always or not (proposed or have_grammar):
            drafts = {request: draft for _, request, draft in proposed}
        else:
            drafts = self._gated(plan, sorted(proposed, key=lambda each: -_chance(each[0], each[1], 0)))
        for request in drafts:
            self._records[request].pause = 1
        return drafts

    def _gated(
        self, plan: Mapping[Request, int], proposed: Sequence[tuple[_Record, Request, list[int]]]
    ) -> dict[Request, list[int]]:
        """As much of each draft as pays, beside those before it."""
        tokens, drafts = float(len(plan)), {}
        draft_us = self._cost.draft_us / max(len(proposed), 1)  # a model drafts a token of all of them at a time
        us = self._cost.predict(
            work_of(Row(0, request.num_computed_tokens, count, 1) for request, count in plan.items())
        )
        self._rate = tokens / us
        for record, request, draft in proposed:
            own_us = draft_us if is_unknown(draft) else 0.0
            length, more, longer_us = self._worth(record, request, len(draft), tokens / us, own_us)
            if length > 1:  # is each of them worth it also at the rate that they would bring?
                rate = (tokens + more) / (us + longer_us)
                length, more, longer_us = self._worth(record, request, length, rate, own_us)
            if not length and is_unknown(draft) and record.is_probed(request.num_known_tokens):
                length = 1
            if length:
                tokens, us = tokens + more, us + longer_us
                drafts[request] = draft[:length]
            else:
                if not (is_unknown(draft) or _is_forced(request, 0)):
                    record.expected = (request.num_known_tokens, draft[0])
                self._put_off(request, record)
        return drafts

    def _worth(
        self, record: _Record, request: Request, most: int, rate: float, draft_us: float = 0.0
    ) -> tuple[int, float, float]:
        """How many drafted tokens are worth their time where a step makes `rate` tokens in a microsecond.

        To draft one takes `draft_us`. Returns their number, the tokens to be expected of them, and the microseconds
        that they take.
        """
        start = request.num_computed_tokens
        least, length, expected = self._least_chance(request, rate, draft_us), 0, 0.0
        for chance in itertools.accumulate((_chance(record, request, place) for place in range(most)), operator.mul):
            if chance < least:
                break
            length, expected = length + 1, expected + chance
        us = self._cost.prompt_us(start, 1 + length) - self._cost.predict(Work(0, 1, start, 0, 0)) + length * draft_us
        return (length, expected, us) if expected > rate * us else (0, 0.0, 0.0)

    def _record(self, request: Request) -> _Record:
        """The record of a request, with what is known by now of a token that was proposed before."""
        record = self._records.get(request)
        if record is None:
            record = self._records[request] = _Record(self._acceptance, last_probe=request.num_known_tokens)
        position, token_id = record.expected
        place = position - len(request.prompt_ids)
        if 0 <= place < len(request.output_ids):
            self._note(record, request.output_ids[place] == token_id)
            record.expected = (-1, -1)
        return record

    def verified(self, request: Request, num_drafted: int, num_accepted: int) -> None:
        """Learn what came of a draft."""
        self._num_drafts += 1
        self._num_draft_tokens += num_drafted
        for place in range(num_accepted):
            self._accepted_at[place] += 1
        record = self._records.get(request)
        if record is None:  # it has ended
            return
        for place in range(min(num_accepted + 1, num_drafted)):
            if not _is_forced(request, place):  # else nobody has guessed
                self._note(record, place < num_accepted)

    def _note(self, record: _Record, was_accepted: bool) -> None:
        record.acceptance += RATE * (was_accepted - record.acceptance)
        self._acceptance += SLOW_RATE * (was_accepted - self._acceptance)

    def _put_off(self, request: Request, record: _Record) -> None:
        if self._hesitates or request.is_constrained:
            record.next_try = request.num_known_tokens + record.pause
            record.pause = min(2 * record.pause, LONGEST_PAUSE)

    def forget(self, request: Request) -> None:
        """Drop what is kept of a request that has ended."""
        self._records.pop(request, None)
        self._proposer.forget(request)

    def stats(self) -> DraftStats:
        """What was drafted and accepted since the start."""
        return DraftStats(
            num_drafts=self._num_drafts,
            num_draft_tokens=self._num_draft_tokens,
            num_accepted_at=self._accepted_at.copy(),
        )


def _is_forced(request: Request, place: int) -> bool:
    """Whether the request's grammar allows nothing but the token at a place of its draft."""
    return place < len(request.forced) and request.forced[place]


def _chance(record: _Record, request: Request, place: int) -> float:
    """That a drafted token is accepted if those before it are."""
    return 1.0 if _is_forced(request, place) else min(record.acceptance, MOST_ACCEPTANCE)


def make_gate(
    config: ResolvedConfig, cost: StepCost | None, vocab_size: int, proposer: Proposer | None = None
) -> Gate | None:
    """The gate that a configuration asks for, before `proposer` or the one that it names; None: nothing is drafted."""
    if config.speculative == "none" or cost is None:
        return None
    return Gate(
        InVocabulary(proposer, vocab_size) if proposer else PROPOSERS.get(config.speculative, ModelProposer)(),
        config.speculative_tokens,
        cost,
        hesitates=config.run_ahead > 0,
        always=not config.speculative_gate,
        skips_penalised=config.device == "cuda",
    )


def plan_drafts(gate: Gate, kv: KVCacheManager, plan: Plan, budget: int, new_slots: Set[int] = frozenset()) -> Drafts:
    """Have decodes of `plan` verify drafted tokens too, in a step of at most `budget` tokens.

    As many as the gate lets through, and as there are pages for. Not those in `new_slots`, of which a model that drafts
    knows nothing yet.
    """
    due = [
        request
        for request, count in plan.items()
        if count == 1
        and request.num_computed_tokens + 1 == request.num_known_tokens
        and request.slot not in new_slots
        and gate.is_due(request)
    ]
    room = min(budget - sum(plan.values()), MOST_VERIFIED - len(plan))
    drafts = {}
    for request, draft in gate.draft(plan, due).items():
        known = request.num_known_tokens
        count = min(len(draft), request.max_num_tokens - known - 1, room)
        if count > 0 and kv.reserve(request, known + count):
            drafts[request] = draft[:count]
            plan[request] += count
            room -= count
    return drafts


def verify(request: Request, start: int, draft: list[int], token_ids: list[int], gate: Gate | None) -> list[int]:
    """What the request gains of the tokens that were sampled behind the one at `start` and its draft.

    Those that follow drafted tokens equal to them, and the first that does not. What was computed of the draft behind
    it counts as not computed.
    """
    pairs = zip(draft, token_ids, strict=False)
    num_accepted = next((place for place, (ours, theirs) in enumerate(pairs) if ours != theirs), len(draft))
    request.num_drafted = 0
    request.num_computed_tokens = start + 1 + num_accepted
    if gate is not None:
        gate.verified(request, len(draft), num_accepted)
    return token_ids[: num_accepted + 1]


def add_run(outputs: StepOutputs, gained: Sequence[StepOutputs]) -> None:
    """Add to a step's outputs what a request gained in it, token by token; several tokens are one output."""
    if len(gained) == 1:
        [one] = gained
        outputs.request_ids += one.request_ids
        outputs.token_ids += one.token_ids
        outputs.others += one.others
    elif gained:
        first, *_, last = parts = [output for one in gained for output in one]
        outputs.others.append(
            TokenOutput(
                request_id=first.request_id,
                token_ids=[token_id for part in parts for token_id in part.token_ids],
                logprobs=[entry for part in parts for entry in part.logprobs or ()] or None,
                prompt_logprobs=first.prompt_logprobs,
                finish_reason=last.finish_reason,
                stop_token_id=last.stop_token_id,
                num_cached_tokens=max(first.num_cached_tokens, last.num_cached_tokens),
            )
        )
