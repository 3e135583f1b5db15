"""Who runs in the next step, and with how many tokens. Integers in, integers out.

A request has `num_computed_tokens` and catches up with `num_tokens`; a prompt chunk, a decode, a resumed request are
the same case. `schedule()` may run ahead of `update()` by any number of steps. Pages are the KVCacheManager's business;
nothing here knows tensors, text or time.

    add ─▶ waiting ──admit──▶ running ──end / abort / fail──▶ (leaving) ─▶ gone
              ▲                  │
              └─── (leaving) ◀───┘ preempted, keeps its output       leaving: still part of steps that were not read

A running request is catching up (its prompt, or a page, is still missing) or it is decoding: then it is a member of the
DecodeGroup and in every step. A step costs what is due in it, not what takes part in it: members are handled one by one
only when they begin a page, end or leave, and the tokens of the others are passed on as whole columns.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import msgspec

from mini_sglang.config import EngineConfig
from mini_sglang.request import FinishReason, Request, RequestStatus, StepOutputs, TokenLogprobs, TokenOutput
from mini_sglang.scheduling.batch import NewRow, Row, ScheduledBatch, StepResult
from mini_sglang.scheduling.decode_group import DecodeGroup, Members
from mini_sglang.scheduling.kv_cache import KVCacheManager
from mini_sglang.scheduling.policy import POLICIES
from mini_sglang.scheduling.radix_cache import Match, common_prefix

FIRST_EXPECTED_OUTPUT = 128.0  # tokens, before any request has ended
EXPECTED_OUTPUT_WEIGHT = 1 / 16  # of the latest ended request in the running mean
WORTH_WAITING = 16  # shared prompt tokens being computed elsewhere that a waiting request holds back for

Plan = dict[Request, int]  # how many tokens the step computes of each request that catches up, in row order


T = TypeVar("T")


class SchedulerStats(msgspec.Struct, frozen=True, kw_only=True):
    """Gauges of now (first six) and counters since the start."""

    num_running: int
    num_waiting: int
    num_pages: int
    num_free_pages: int
    num_cached_pages: int  # in the prefix cache, held by no request
    num_used_pages: int  # held by requests
    num_prompt_tokens: int  # of admitted requests
    num_cached_tokens: int  # of these, found in the prefix cache
    num_generated_tokens: int
    num_preemptions: int
    num_finished: int
    num_aborted: int
    num_steps: int


class _Counters(msgspec.Struct):
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    finished: int = 0
    aborted: int = 0
    steps: int = 0


class StepNames(NamedTuple):
    """Whom a step is about, by request id."""

    decodes: tuple[str, ...]  # row by row; the same object as long as they are the same
    chunks: list[str]
    preempted: list[str]  # since the step before


@dataclass(slots=True)
class _Launched:
    """A step that was launched and not read: whose tokens its rows will bring."""

    batch: ScheduledBatch
    members: Members  # of batch.decodes
    chunks: list[Request]  # of batch.chunks
    preempted: list[str]  # ids of requests that were, since the step before
    departed: list[Request] = field(default_factory=list)  # members that have left the group since

    @property
    def requests(self) -> list[Request]:
        return [*self.members.requests, *self.chunks]


class Scheduler:
    """Continuous batching over one KV pool. The sizes in `config` must be known, none left open.

    The most senior running request (lowest rank) can take the pages of all others, so it always advances: nothing
    blocks and no two requests preempt each other for ever.
    """

    def __init__(self, config: EngineConfig) -> None:
        num_pages = _known("num_pages", config.num_pages)
        self.kv = KVCacheManager(num_pages, config.page_size, reuse=config.cache == "radix")
        self._page_size = config.page_size
        self._context_length = _known("context_length", config.context_length)
        self._pool_tokens = num_pages * config.page_size
        self._budget = _known("max_prefill_tokens", config.max_prefill_tokens)
        self._policy = POLICIES[config.schedule]()
        self._requests: dict[str, Request] = {}  # those that have not ended
        self._waiting: list[Request] = []  # sorted by rank
        self._running: list[Request] = []  # sorted by rank
        self._decoding = DecodeGroup(config.page_size)  # of these, those that compute one token in every step
        self._catching_up: list[Request] = []  # and the others, sorted by rank
        self._leaving: dict[Request, None] = {}  # ended or preempted, but in launched steps
        self._restarting: dict[Request, None] = {}  # of these: what launched steps sampled for them is void
        self._launched: deque[_Launched] = deque()
        self.num_slots = _known("max_running_requests", config.max_running_requests)
        self._free_slots = list(range(self.num_slots - 1, -1, -1))
        self._preempted: list[str] = []  # ids, since the last step that was scheduled
        self._published = 0  # the step after which the cache was told what decoding has filled
        self._is_full = False  # an admission failed for lack of pages, and nothing has spoken for another try since
        self.expected_output = FIRST_EXPECTED_OUTPUT  # tokens of an answer: a running mean; 0 is the boldest guess
        self._num_arrivals = 0
        self._counters = _Counters()

    # -- coming and going ---------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request. Raises ValueError, naming the field, if its id is in use or its prompt can never fit."""
        if request.request_id in self._requests:
            raise ValueError(f"request_id {request.request_id!r} is in use by a request that has not ended")
        length = len(request.prompt_ids)
        if length == 0:
            raise ValueError("prompt must hold at least one token, got none")
        if length >= self._context_length:
            raise ValueError(
                f"prompt has {length} tokens and needs room for one more, but the context length is "
                f"{self._context_length} tokens"
            )
        if length > self._pool_tokens:
            raise ValueError(f"prompt has {length} tokens, but the KV cache holds only {self._pool_tokens} tokens")
        # The token sampled last is never computed, so it needs no place in the pool.
        request.max_num_tokens = min(self._context_length, self._pool_tokens + 1)
        if request.params.max_tokens is not None:
            request.max_num_tokens = min(request.max_num_tokens, length + request.params.max_tokens)
        request.is_constrained = request.params.is_constrained
        self._num_arrivals += 1
        request.arrival = self._num_arrivals
        self._requests[request.request_id] = request
        insort(self._waiting, request, key=self._policy.rank)
        self._is_full = False

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> None:
        """End a request wherever it stands, without an output; an id that is not known (any more) is ignored.

        With `FinishReason.STOP` (its text ran into a stop string) it counts as finished, not as aborted.
        """
        request = self._requests.get(request_id)
        if request is not None:
            self._end(request, reason)

    def set_mask(self, request_id: str, mask: bytes) -> None:
        """Say which tokens may follow those that were read of a constrained request; until then it has to wait."""
        request = self._requests.get(request_id)
        if request is not None:
            request.mask, request.mask_position = mask, request.num_known_tokens

    def end(
        self, request_id: str, reason: FinishReason, error: str | None = None, error_param: str | None = None
    ) -> TokenOutput | None:
        """End a request between two tokens; returns its last output, or None if it has ended already."""
        request = self._requests.get(request_id)
        return None if request is None else self._end_without_token(request, reason, error, error_param)

    def _end_without_token(
        self, request: Request, reason: FinishReason, error: str | None = None, error_param: str | None = None
    ) -> TokenOutput:
        self._end(request, reason)
        return TokenOutput(
            request_id=request.request_id,
            token_ids=[],
            finish_reason=reason,
            num_cached_tokens=request.num_cached_tokens,
            error=error,
            error_param=error_param,
        )

    def _end(self, request: Request, reason: FinishReason) -> None:
        if request.status is RequestStatus.RUNNING:
            self._stop_running(request)
        elif request not in self._leaving:
            self._remove(self._waiting, request)
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        del self._requests[request.request_id]
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._counters.finished += 1
            self.expected_output += EXPECTED_OUTPUT_WEIGHT * (len(request.output_ids) - self.expected_output)
        else:
            self._counters.aborted += 1
        self._leave(request)

    def _preempt(self, request: Request) -> None:
        """Make a running request wait again, its pages given back to the cache."""
        self._stop_running(request)
        request.status = RequestStatus.WAITING
        self._counters.preemptions += 1
        self._preempted.append(request.request_id)
        self._leave(request)

    def _leave(self, request: Request) -> None:
        """Take pages and slot back from a request that does not run any more, once no launched step contains it.

        The one place where this happens; called when it stops running and whenever a step with it was read.
        """
        self._is_full = False
        if self._is_in_flight(request):
            self._leaving[request] = None
            return
        self._leaving.pop(request, None)
        self._restarting.pop(request, None)
        if request.slot is not None:
            self.kv.release(request)
            self._free_slots.append(request.slot)
            request.slot = None
        if request.status is RequestStatus.WAITING:
            insort(self._waiting, request, key=self._policy.rank)
        else:
            self.kv.forget(request)

    def _is_in_flight(self, request: Request) -> bool:
        """Whether a launched step contains a request that does not decode (any more)."""
        return bool(self._launched) and request.last_step >= self._launched[0].batch.step

    def _stop_running(self, request: Request) -> None:
        self._remove(self._running, request)
        if request in self._decoding:
            self._leave_group(request)
        else:
            self._remove(self._catching_up, request)

    def _leave_group(self, request: Request) -> None:
        """Let a member go. What it is in already will be read for it alone."""
        self._decoding.leave(request, self._counters.steps)
        for launched in self._launched:
            if request in launched.members.requests:
                launched.departed.append(request)

    def _fall_behind(self, request: Request) -> None:
        """Let a member go that still runs."""
        self._leave_group(request)
        self.kv.may_have_filled(request)
        insort(self._catching_up, request, key=self._policy.rank)

    def _remove(self, requests: list[Request], request: Request) -> None:
        del requests[bisect_left(requests, self._policy.rank(request), key=self._policy.rank)]

    # -- before a step ------------------------------------------------------------------------------------------------

    def schedule(self) -> ScheduledBatch | None:
        """The next step, or None if nothing can be computed before a launched step is read (or at all).

        Every running request that has one token to compute gets it. Prompts share what is left of `max_prefill_tokens`
        (at least one token, so that they advance beside any number of streams), running ones before waiting ones.
        """
        plan: Plan = {}
        enough_pages, prefilling = self._plan_decodes(plan)
        budget = max(self._budget - len(self._decoding) - len(plan), 1)
        for request in prefilling:
            if budget == 0:
                break
            if request.status is RequestStatus.RUNNING:  # not preempted meanwhile
                count = min(request.num_tokens - request.num_computed_tokens, budget)
                if self._make_room(request, request.num_computed_tokens + count, plan):
                    plan[request] = count
                    budget -= count
                else:
                    enough_pages = False
        new_rows: list[NewRow] = []
        if self._waiting and self._free_slots and budget and enough_pages and not self._is_full:
            self._admit_waiting(plan, budget, new_rows)
        return self._launch(plan, new_rows) if plan or self._decoding else None

    def _plan_decodes(self, plan: Plan) -> tuple[bool, list[Request]]:
        """Give every running request with one token to compute a page, if it begins one: the senior first if too few
        are left. Returns whether all got theirs, and the requests with more to compute.
        """
        enough_pages, prefilling, step = True, [], self._counters.steps + 1
        due = self._decoding.take_beginning_page(step)
        in_order = self._catching_up
        if len(due) + len(in_order) > self.kv.num_available_pages:  # else the order is all one
            self._settle(due)
            in_order = sorted([*due, *in_order], key=self._policy.rank)
        elif due:
            self.kv.reserve_next(*due.columns)
            self._decoding.expect_next_pages(due, step)
        for request in list(in_order):
            if request.status is not RequestStatus.RUNNING:  # preempted by one before it
                continue
            num_tokens = request.num_tokens
            if num_tokens >= request.max_num_tokens:  # its last token is on its way
                continue
            if num_tokens - request.num_computed_tokens > 1:
                prefilling.append(request)
            elif not request.may_sample:  # its last token, or what may follow it, is not known yet
                continue
            elif not self._make_room(request, num_tokens, plan):
                enough_pages = False
                if request in self._decoding:
                    self._fall_behind(request)
            elif request in self._decoding:
                self._decoding.expect_page(request)
            elif request.is_constrained or request.num_computed_tokens < len(request.prompt_ids):
                plan[request] = 1
            else:
                self._remove(self._catching_up, request)
                self._decoding.join(request, step)
        return enough_pages, prefilling

    def _make_room(self, request: Request, num_tokens: int, plan: Plan) -> bool:
        """Get pages up to `num_tokens`, if need be from requests with a later rank. If False, it skips this step."""
        while not self.kv.reserve(request, num_tokens):
            if self._leaving or self.kv.num_returning_pages or self._running[-1] is request:
                return False  # wait for pages that are on their way back, or for the more senior to end
            victim = self._running[-1]
            plan.pop(victim, None)
            self._preempt(victim)
        return True

    def _admit_waiting(self, plan: Plan, budget: int, new_rows: list[NewRow]) -> None:
        """Admit waiting requests in the policy's order until a slot, pages or the budget are missing."""
        self._publish_filled()
        computing = [request for request, count in plan.items() if self._computes_prompt(request, count)]
        growth = sum(self._expected_pages(request) - len(request.page_ids) for request in self._running)
        for request in self._policy.order(self._waiting, self.kv.cached_tokens):
            if budget == 0 or not self._free_slots:
                break
            if not request.may_sample:
                continue
            match = self.kv.match(request)
            if self._is_being_computed(request, match, computing):
                continue
            count = min(request.num_tokens - match.num_tokens, budget)
            fits = self._expected_to_fit(request, match, growth)
            if not (fits and self.kv.admit(request, match, match.num_tokens + count)):
                self._is_full = True
                break
            self._start(request, new_rows)
            growth += self._expected_pages(request) - len(request.page_ids)
            plan[request] = count
            computing.append(request)
            budget -= count

    def _publish_filled(self) -> None:
        """Let the cache know what decoding has filled."""
        filled, self._published = self._decoding.began_page_since(self._published), self._counters.steps
        self._settle(filled)
        self.kv.publish_filled(self._published, filled)
        self._free_replaced()

    def _computes_prompt(self, request: Request, count: int) -> bool:
        return count > 1 or request.num_computed_tokens < len(request.prompt_ids)

    def _is_being_computed(self, request: Request, match: Match, computing: list[Request]) -> bool:
        """Whether a request of this very step is going to compute more of the same beginning than the cache has.

        Then waiting saves work. It cannot last: each step in which this says yes, the other request advances.
        """
        mine, cached = self.kv.tokens(request), match.num_tokens
        left = len(mine) - cached
        if left < 2 or not self.kv.reuse or request.wants_prompt_logprobs:
            return False
        for other in computing:
            theirs = self.kv.tokens(other)
            if len(theirs) > cached and theirs[cached] == mine[cached] and other.cache_salt == request.cache_salt:
                saved = min(common_prefix(mine, theirs), len(mine) - 1) - cached
                if saved >= WORTH_WAITING or 2 * saved >= left:
                    return True
        return False

    def _expected_pages(self, request: Request) -> int:
        """Pages that the request will have used when it ends, by the mean length of answers so far."""
        left = max(self.expected_output - len(request.output_ids), self._page_size)
        return self.kv.pages_for(min(request.num_known_tokens + int(left), request.max_num_tokens - 1))

    def _expected_to_fit(self, request: Request, match: Match, growth: int) -> bool:
        """Optimistic: expected, not largest, output lengths of this and of all running requests (`growth` pages)."""
        if not self._running:
            return True  # alone it always fits
        needed = self._expected_pages(request) - match.num_locked_pages
        return needed + growth <= self.kv.num_available_pages

    def _start(self, request: Request, new_rows: list[NewRow]) -> None:
        """Move an admitted request from waiting to running and give it a slot."""
        self._policy.admitted(request, self._waiting)
        self._remove(self._waiting, request)
        insort(self._running, request, key=self._policy.rank)
        insort(self._catching_up, request, key=self._policy.rank)
        request.status = RequestStatus.RUNNING
        request.slot = self._free_slots.pop()
        new_rows.append(self._new_row(request, request.slot))
        request.prompt_logprobs = []  # what was computed before a preemption will be again
        if not request.was_admitted:
            request.was_admitted = True
            request.num_cached_tokens = request.num_computed_tokens
            self._counters.prompt_tokens += len(request.prompt_ids)
            self._counters.cached_tokens += request.num_cached_tokens

    def _new_row(self, request: Request, slot: int) -> NewRow:
        token_ids = request.token_ids if request.output_ids else request.prompt_ids
        params = request.params
        if params.prompt_logprobs is not None and not request.wants_prompt_logprobs:
            params = msgspec.structs.replace(params, prompt_logprobs=None)
        ends = sorted(request.stop_ids) if params.min_tokens else []
        return NewRow(slot, token_ids, len(request.prompt_ids), params, request.seed, ends)

    def _launch(self, plan: Plan, new_rows: list[NewRow]) -> ScheduledBatch:
        """Turn the plan into a batch; its tokens count as computed from here on, and full pages are published."""
        self._counters.steps += 1
        step = self._counters.steps
        new_pages, copies = self.kv.take_changes()
        chunks, masks = [], {}
        for request, count in plan.items():
            start, num_tokens = request.num_computed_tokens, request.num_tokens
            end = request.num_computed_tokens = start + count
            samples = end == num_tokens
            assert request.slot is not None
            chunks.append(Row(request.slot, start, count, samples))
            if samples and request.is_constrained:
                masks[request.slot] = request.mask
            request.last_step = step
            if start < len(request.prompt_ids) or count > 1:
                self.kv.commit(request, step, tail=samples)
        if plan:
            self._is_full = False  # what a chunk has computed may be what a waiting request begins with
        members = self._decoding.members
        next_pages = self.kv.take_next_pages()
        batch = ScheduledBatch(step, members.rows, chunks, new_rows, new_pages, copies, masks, next_pages)
        self._launched.append(_Launched(batch, members, list(plan), self._preempted))
        self._preempted = []
        for request in self._decoding.take_ending(step):
            self._fall_behind(request)
        return batch

    def settle(self) -> None:
        """Bring counters and output of every running request up to date, for whoever wants to look at them."""
        self._settle(self._decoding)

    def _settle(self, requests: Iterable[Request]) -> None:
        """Bring these requests' counters up to date, as far as they decode, and the output of all."""
        self._decoding.write_down()
        for request in requests:
            if request in self._decoding:
                self._decoding.settle(request, self._counters.steps)

    # -- after a step -------------------------------------------------------------------------------------------------

    def update(self, batch: ScheduledBatch, result: StepResult) -> StepOutputs:
        """Take in what the oldest launched step sampled; returns what each request gained.

        Raises ValueError if `batch` is not the oldest step that was launched and not read, or if `result` is not its.
        """
        if not self._launched or self._launched[0].batch is not batch:
            raise ValueError(f"step {batch.step} is not the oldest launched step")
        launched = self._launched.popleft()
        outputs = self._take_tokens(launched, result)
        self._note_read_steps()
        return outputs

    def _note_read_steps(self) -> None:
        for request in list(self._leaving):
            self._leave(request)
        self._free_replaced()

    def _free_replaced(self) -> None:
        """Free pages that were exchanged for cached ones, as far as no step that uses them is still to be read.

        Also to be called where pages are exchanged outside of a step: there may be none whose reading would do it.
        """
        self.kv.steps_read(self._launched[0].batch.step - 1 if self._launched else self._counters.steps)

    def _take_tokens(self, launched: _Launched, result: StepResult) -> StepOutputs:
        """Give every request its token: members of the group all at once, but for those with more to see to."""
        members, batch = launched.members, launched.batch
        alone = [request for row, request in zip(batch.chunks, launched.chunks, strict=True) if row.samples]
        num_members = len(members.requests)
        if not len(result.token_ids) == len(result.logprobs) == num_members + len(alone):
            raise ValueError(
                f"step {batch.step} samples {num_members + len(alone)} tokens, not {len(result.token_ids)}"
            )
        if result.prompt_logprobs:
            for row, request in zip(batch.chunks, launched.chunks, strict=True):
                request.prompt_logprobs += result.prompt_logprobs.get(row.slot, ())
        apart = self._rows_apart(launched, result)
        request_ids: Sequence[str] = members.request_ids
        token_ids = result.token_ids[:num_members]
        if apart:
            self._decoding.write_down()
            request_ids, token_ids = _without(request_ids, apart), _without(token_ids, apart)
            deque(map(list.append, _without(members.output_ids, apart), token_ids), maxlen=0)
        else:
            self._decoding.note(members, token_ids)
        self._counters.generated_tokens += len(token_ids)
        others = [
            self._take_token(request, result.token_ids[row], result.logprobs[row])
            for row, request in [*((row, members.requests[row]) for row in apart), *enumerate(alone, num_members)]
            if request.status is not RequestStatus.FINISHED and request not in self._restarting
        ]
        return StepOutputs(request_ids, token_ids, others)

    def _rows_apart(self, launched: _Launched, result: StepResult) -> list[int]:
        """Rows of the group whose request has left it, may end with this token, or gets more than the token."""
        members = launched.members
        rows = {members.requests.index(request) for request in launched.departed}
        if self._decoding.may_stop(result.token_ids):
            rows.update(self._decoding.rows_that_may_stop(result.token_ids[: len(members.requests)]))
        if members.want_logprobs:
            rows.update(row for row in range(len(members.requests)) if result.logprobs[row] is not None)
        return sorted(rows)

    def _take_token(self, request: Request, token_id: int, logprobs: TokenLogprobs | None) -> TokenOutput:
        prompt_logprobs = request.prompt_logprobs if request.wants_prompt_logprobs else None
        request.output_ids.append(token_id)
        self._counters.generated_tokens += 1
        reason = None
        is_end = token_id in request.stop_ids
        if is_end:
            reason = FinishReason.STOP
        elif request.num_known_tokens >= request.max_num_tokens:
            reason = FinishReason.LENGTH
        if reason is not None:
            self._end(request, reason)
        return TokenOutput(
            request_id=request.request_id,
            token_ids=[token_id],
            logprobs=None if logprobs is None else [logprobs],
            prompt_logprobs=prompt_logprobs,
            finish_reason=reason,
            stop_token_id=token_id if is_end else None,
            num_cached_tokens=request.num_cached_tokens,
        )

    def fail(self, batch: ScheduledBatch, error: str) -> StepOutputs:
        """A launch or a read raised: end every request of the batch with an error; all others live on.

        What the step should have written is unpublished. Other requests in steps launched later may have read it; they
        start again from the tokens known so far.
        """
        index = next((i for i, launched in enumerate(self._launched) if launched.batch is batch), None)
        if index is None:
            raise ValueError(f"step {batch.step} was not launched, or was read before")
        for request in list(self._decoding):  # from here on each is looked at alone
            self._fall_behind(request)
        failed, later = self._launched[index], list(self._launched)[index + 1 :]
        del self._launched[index]
        for launched in [failed, *later]:
            for row, request in zip(launched.batch.rows, launched.requests, strict=True):
                self.kv.spoil(request, row.start)
        outputs = []
        for request in failed.requests:
            steps = [launched.batch.step for launched in self._launched if request in launched.requests]
            request.last_step = max(steps, default=0)
            if request.status is not RequestStatus.FINISHED:
                outputs.append(self._end_without_token(request, FinishReason.ERROR, error))
        for request in [*self._running, *self._leaving]:
            if request.status is not RequestStatus.FINISHED and self.kv.is_spoiled(request):
                self._restart(request)
        for request in self._running:
            self.kv.announce_again(request)
        self._note_read_steps()
        return StepOutputs(others=outputs)

    def _restart(self, request: Request) -> None:
        """Compute a request again from its known tokens; what launched steps sampled for it is void."""
        if self._is_in_flight(request):
            self._restarting[request] = None
        if request.status is RequestStatus.RUNNING:
            self._preempt(request)

    # -- looking ------------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether any request has not ended, or any launched step was not read."""
        return bool(self._requests or self._launched)

    @property
    def next_step(self) -> int:
        """The number of the step that is scheduled next."""
        return self._counters.steps + 1

    def latest_names(self) -> StepNames:
        """Whom the step is about that was scheduled last, and not read yet."""
        launched = self._launched[-1]
        chunks = [request.request_id for request in launched.chunks]
        return StepNames(launched.members.request_ids, chunks, launched.preempted)

    def stats(self) -> SchedulerStats:
        """Figures of this moment; O(1)."""
        kv, counters = self.kv, self._counters
        free, cached = kv.num_free_pages, kv.num_cached_pages
        return SchedulerStats(
            num_running=len(self._running),
            num_waiting=len(self._requests) - len(self._running),
            num_pages=kv.num_pages,
            num_free_pages=free,
            num_cached_pages=cached,
            num_used_pages=kv.num_pages - free - cached,
            num_prompt_tokens=counters.prompt_tokens,
            num_cached_tokens=counters.cached_tokens,
            num_generated_tokens=counters.generated_tokens,
            num_preemptions=counters.preemptions,
            num_finished=counters.finished,
            num_aborted=counters.aborted,
            num_steps=counters.steps,
        )

    def flush_cache(self) -> int:
        """Forget every cached page that no request holds; returns how many."""
        return self.kv.evict(self.kv.num_cached_pages)

    def check(self) -> None:
        """Raise RuntimeError, saying what is wrong, unless every page, slot and request is accounted for."""
        self.kv.check()
        with_slot = [request for request in (*self._running, *self._leaving) if request.slot is not None]
        slots = sorted([request.slot for request in with_slot if request.slot is not None] + self._free_slots)
        if slots != list(range(self.num_slots)):
            raise RuntimeError(f"slots are lost or given twice: {slots}")
        live = {*self._waiting, *self._running, *self._leaving}
        missing = [request_id for request_id, request in self._requests.items() if request not in live]
        if missing:
            raise RuntimeError(f"requests are nowhere: {missing}")
        for name, requests in (("waiting", self._waiting), ("running", self._running)):
            ranks = [self._policy.rank(request) for request in requests]
            if ranks != sorted(set(ranks)):
                raise RuntimeError(f"the {name} requests are not in order: {ranks}")
        self._decoding.check(self._counters.steps)
        self._decoding.write_down()
        if sorted([*self._decoding, *self._catching_up], key=self._policy.rank) != self._running:
            raise RuntimeError("the running requests are not those that decode and those that catch up")
        for request in with_slot:
            self._check_steps(request)

    def _check_steps(self, request: Request) -> None:
        """A request's counters say which launched steps contain it, and how many tokens they sample for it."""
        num_computed, last_step = request.num_computed_tokens, request.last_step
        if request in self._decoding:
            num_computed, last_step = self._decoding.progress(request, self._counters.steps)
        steps = [launched for launched in self._launched if request in launched.requests]
        oldest = self._launched[0].batch.step if self._launched else self._counters.steps + 1
        if max((launched.batch.step for launched in steps), default=oldest - 1) != max(last_step, oldest - 1):
            raise RuntimeError(f"request {request.request_id} is not in step {last_step}, or in a later one too")
        samples = sum(row.slot == request.slot and row.samples for launched in steps for row in launched.batch.rows)
        if request.status is RequestStatus.RUNNING and samples != max(num_computed + 1 - request.num_known_tokens, 0):
            raise RuntimeError(
                f"request {request.request_id} has computed {num_computed} tokens; {samples} are to come"
            )


def _without(column: Sequence[T], rows: list[int]) -> list[T]:
    """`column` but for the entries at `rows`, which are sorted."""
    left = list(column)
    for row in reversed(rows):
        del left[row]
    return left


def _known(name: str, value: int | None) -> int:
    if value is None:
        raise ValueError(f"{name} must be known before scheduling")
    return value
