"""Decides which requests run in the next step, and how many tokens of each. Integers in, integers out.

A request has `num_computed_tokens` and catches up with `num_tokens`: a prompt chunk, a prefix hit, a decode and a
resumed request are the same case. `schedule()` may run ahead of `update()` by any number of steps; between the two a
step counts as launched. The KVCacheManager moves the pages; nothing here knows tensors, text or a clock.

    add ─▶ waiting ──admit──▶ running ──end / abort / fail──▶ (leaving) ─▶ gone
              ▲                  │
              └─── (leaving) ◀───┘ preempted, keeps its output       leaving: still part of steps that were not read
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from dataclasses import dataclass

import msgspec

from mini_sglang.config import ResolvedConfig
from mini_sglang.errors import FieldError
from mini_sglang.outputs import FinishReason, StepOutputs, TokenLogprobs, TokenOutput
from mini_sglang.request import Request, RequestStatus
from mini_sglang.scheduling.batch import NewRequest, Row, ScheduledBatch, StepResult
from mini_sglang.scheduling.kv_cache import CacheListener, KVCacheManager
from mini_sglang.scheduling.policy import EXPECTED_OUTPUT_WEIGHT, FIRST_EXPECTED_OUTPUT, POLICIES
from mini_sglang.scheduling.radix_cache import Match, common_prefix
from mini_sglang.scheduling.speculation import Drafts, Gate, Plan, add_run, plan_drafts, verify
from mini_sglang.scheduling.stats import STEP_SIZES, SchedulerStats
from mini_sglang.scheduling.step_cost import PromptBudget, StepCost, Work

WORTH_SEARCHING = 16  # tokens that a step must have left to look for a short prompt behind longer ones
WORTH_WAITING = 16  # a waiting request holds back while another one computes this many of its first tokens


class _Counters(msgspec.Struct):
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    finished: int = 0
    aborted: int = 0
    steps: int = 0
    step_tokens: int = 0
    step_sizes: list[int] = msgspec.field(default_factory=lambda: [0] * (len(STEP_SIZES) + 1))

    def count_step(self, num_tokens: int) -> None:
        self.steps += 1
        self.step_tokens += num_tokens
        self.step_sizes[bisect_left(STEP_SIZES, num_tokens)] += 1


@dataclass(frozen=True, slots=True)
class UnreadStep:
    """A step that was launched and whose result was not read yet."""

    batch: ScheduledBatch
    requests: list[Request]  # one for each of batch.rows
    preempted: list[str]  # ids of the requests that were preempted since the step before

    @property
    def admitted(self) -> list[str]:
        """Ids of the requests that take a slot with this step."""
        slots = {row.slot for row in self.batch.new_requests}
        rows = zip(self.requests, self.batch.rows, strict=True)
        return [request.request_id for request, row in rows if row.slot in slots]


class Scheduler:
    """Continuous batching over one KV pool.

    The running request that comes first in the policy's order can take the pages of all others, so it always advances:
    nothing deadlocks, and no two requests preempt each other for ever.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        cost: StepCost | None = None,
        cache_listener: CacheListener | None = None,
        gate: Gate | None = None,
    ) -> None:
        """`cost` predicts what a step takes; without it `max_step_ms` bounds none. The listener follows the cache.

        Without a gate nothing is drafted.
        """
        reuse = config.cache == "radix"
        self.kv = KVCacheManager(config.num_pages, config.page_size, reuse=reuse, listener=cache_listener)
        self._page_size = config.page_size
        self._context_length = config.context_length
        self._pool_tokens = config.num_pages * config.page_size
        self._max_prefill_tokens = config.max_prefill_tokens
        self._max_step_us = 1000 * config.max_step_ms
        self._cost = cost if config.max_step_ms else None  # None: steps are not bounded in time
        self._gate = gate
        self._policy = POLICIES[config.schedule]()
        self._requests: dict[str, Request] = {}  # those that have not ended
        self._waiting: list[Request] = []  # in the policy's order
        self._running: list[Request] = []  # in the policy's order
        self._leaving: dict[Request, None] = {}  # ended or preempted, but still in launched steps
        self._restarting: dict[Request, None] = {}  # those of them whose tokens from launched steps are void
        self._unread: deque[UnreadStep] = deque()
        self.num_slots = config.max_running_requests
        self._free_slots = list(range(self.num_slots - 1, -1, -1))
        self._preempted: list[str] = []  # ids, since the last step that was scheduled
        self._is_full = False  # an admission found too few pages, and nobody came, left or published a prompt since
        self.expected_output = FIRST_EXPECTED_OUTPUT  # tokens of an answer: a running mean; 0 admits the most
        self._num_arrivals = 0
        self._counters = _Counters()

    # -- coming and going ---------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request. Raises FieldError if its id is in use or its prompt can never fit."""
        if request.request_id in self._requests:
            raise FieldError("request_id", f"{request.request_id!r} is in use by a request that has not ended")
        length = len(request.prompt_ids)
        if length == 0:
            raise FieldError("prompt", "must hold at least one token, got none")
        if length >= self._context_length:
            raise FieldError(
                "prompt",
                f"has {length} tokens and needs room for one more, but the context length is "
                f"{self._context_length} tokens",
            )
        if length > self._pool_tokens:
            raise FieldError("prompt", f"has {length} tokens, but the KV cache holds only {self._pool_tokens} tokens")
        # The token sampled last is never computed, so it needs no place in the pool.
        request.max_num_tokens = min(self._context_length, self._pool_tokens + 1)
        if request.params.max_tokens is not None:
            request.max_num_tokens = min(request.max_num_tokens, length + request.params.max_tokens)
        self._num_arrivals += 1
        request.arrival = self._num_arrivals
        self._policy.arrived(request)
        self._requests[request.request_id] = request
        insort(self._waiting, request, key=self._policy.sort_key)
        self._is_full = False

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> None:
        """End a request in any state, without an output. An unknown id is ignored: the request may just have ended.

        With `FinishReason.STOP` (its text ran into a stop string) the request counts as finished, not as aborted.
        """
        request = self._requests.get(request_id)
        if request is not None:
            self._end(request, reason)

    def propose(self, request_id: str) -> list[int] | None:
        """What a constrained request may go on with; for `set_masks`. None: nothing is to be drafted for it."""
        request = self._requests.get(request_id)
        return None if request is None or self._gate is None else self._gate.propose(request)

    def set_masks(self, request_id: str, masks: list[bytes], draft: list[int], forced: list[bool]) -> None:
        """Set which tokens may follow the tokens read so far of a constrained request, which waits until then.

        And which may follow each token of a draft, of whose tokens some may be all that the grammar allows.
        """
        request = self._requests.get(request_id)
        if request is not None:
            request.masks, request.mask_position = masks, request.num_known_tokens
            request.draft, request.forced = draft, forced

    def end(
        self, request_id: str, reason: FinishReason, error: str | None = None, error_field: str | None = None
    ) -> TokenOutput | None:
        """End a request between two tokens; returns its last output, or None if it has ended already."""
        request = self._requests.get(request_id)
        return None if request is None else self._end_without_token(request, reason, error, error_field)

    def _end_without_token(
        self, request: Request, reason: FinishReason, error: str | None = None, error_field: str | None = None
    ) -> TokenOutput:
        self._end(request, reason)
        return TokenOutput(
            request_id=request.request_id,
            token_ids=[],
            finish_reason=reason,
            num_cached_tokens=request.num_cached_tokens,
            error=error,
            error_field=error_field,
        )

    def _end(self, request: Request, reason: FinishReason) -> None:
        if request.status is RequestStatus.RUNNING:
            self._remove(self._running, request)
        elif request not in self._leaving:
            self._remove(self._waiting, request)
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        del self._requests[request.request_id]
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._counters.finished += 1
            self._policy.ended(request)
            self.expected_output += EXPECTED_OUTPUT_WEIGHT * (len(request.output_ids) - self.expected_output)
        else:
            self._counters.aborted += 1
        self._leave(request)

    def _preempt(self, request: Request) -> None:
        """Give a running request's pages back to the cache and let it wait again."""
        self._remove(self._running, request)
        request.status = RequestStatus.WAITING
        self._counters.preemptions += 1
        self._preempted.append(request.request_id)
        self._leave(request)

    def _leave(self, request: Request) -> None:
        """Take pages and slot back from a request that no longer runs, once no launched step contains it.

        No other code does this. It is called when a request stops running and after each step that contained it.
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
            request.slot, request.num_drafted = None, 0
        if request.status is RequestStatus.WAITING:
            insort(self._waiting, request, key=self._policy.sort_key)
        else:
            self.kv.forget(request)
            if self._gate is not None:
                self._gate.forget(request)

    def _is_in_flight(self, request: Request) -> bool:
        """Whether a launched step contains the request."""
        return bool(self._unread) and request.last_step >= self._unread[0].batch.step

    def _remove(self, requests: list[Request], request: Request) -> None:
        del requests[bisect_left(requests, self._policy.sort_key(request), key=self._policy.sort_key)]

    # -- before a step ------------------------------------------------------------------------------------------------

    def schedule(self) -> ScheduledBatch | None:
        """Return the next step, or None if nothing can be computed before a launched step is read (or at all).

        Every running request that lacks one token gets it (a decode). Requests that lack more share what is left of
        `max_prefill_tokens` and, beside decodes, of `max_step_ms` (at least one token, so that they advance beside any
        number of decodes), running requests before waiting ones.
        """
        plan: Plan = {}
        enough_pages, prefilling = self._plan_decodes(plan)
        budget = self._budget_beside(plan, prefilling)
        for request in prefilling:
            if request.status is not RequestStatus.RUNNING:  # preempted in this loop
                continue
            start = request.num_computed_tokens
            count = budget.chunk(start, request.num_tokens - start)
            if count and self._make_room(request, start + count, plan):
                self._plan_chunk(plan, budget, request, count)
            elif count:
                enough_pages = False
        new_requests: list[NewRequest] = []
        if self._waiting and self._free_slots and enough_pages and not self._is_full and budget.most(0):
            self._admit_waiting(plan, budget, new_requests)
        self._extend_long_prompt(plan, budget)
        drafts: Drafts = {}
        if self._gate is not None:
            new_slots = {new.slot for new in new_requests}
            drafts = plan_drafts(self._gate, self.kv, plan, self._max_prefill_tokens, new_slots)
        return self._make_batch(plan, new_requests, drafts) if plan else None

    def _budget_beside(self, decodes: Plan, prefilling: list[Request]) -> PromptBudget:
        """What the step has for prompts: where nobody waits for a next token, as long as `max_prefill_tokens` take.

        Beside decodes a prompt may take what they leave of `max_step_ms`, or half as long as they do. So it may beside
        running requests that skip this step, since their masks or pages are not there yet: the next one is theirs.
        """
        tokens = self._max_prefill_tokens - len(decodes)
        if self._cost is None:
            return PromptBudget(tokens)
        num_prefilling = sum(request.status is RequestStatus.RUNNING for request in prefilling)
        if len(self._running) == num_prefilling:
            return PromptBudget(tokens)
        context = sum(request.num_computed_tokens for request in decodes)
        decode_us = self._cost.predict(Work(1, len(decodes), context, 0, 0))
        return PromptBudget(tokens, max(self._max_step_us - decode_us, decode_us / 2), self._cost)

    def _plan_chunk(self, plan: Plan, budget: PromptBudget, request: Request, count: int) -> None:
        """Plan `count` tokens of a prompt, behind those that are computed or planned."""
        start = request.num_computed_tokens + plan.get(request, 0)
        plan[request] = plan.get(request, 0) + count
        budget.take(start, count, request.num_tokens - start)

    def _extend_long_prompt(self, plan: Plan, budget: PromptBudget) -> None:
        """Give what shorter prompts have left to the one that left them half of the step."""
        if not budget.is_shared:
            return
        for request, count in plan.items():
            start = request.num_computed_tokens + count
            left = request.num_tokens - start
            if left > 0:  # no other row leaves any
                extra = min(left, budget.most(start))
                if extra and self.kv.reserve(request, start + extra):
                    self._plan_chunk(plan, budget, request, extra)
                return

    def _plan_decodes(self, plan: Plan) -> tuple[bool, list[Request]]:
        """Plan one token for each running request that lacks exactly one, and get it a page if it begins one.

        Returns whether there were pages for all of them, and the running requests that lack more tokens.
        """
        enough_pages, prefilling = True, []
        for request in list(self._running):
            if request.status is not RequestStatus.RUNNING:  # preempted for a request before it
                continue
            num_tokens = request.num_tokens
            if num_tokens - request.num_computed_tokens > 1:
                prefilling.append(request)
            elif num_tokens >= request.max_num_tokens or not request.may_sample:
                pass  # its last token, or the mask for the next one, has not arrived yet
            elif self._gate is not None and num_tokens > request.num_known_tokens and self._gate.is_due(request):
                pass  # it is worth waiting for its next token, to draft behind it
            elif self._make_room(request, num_tokens, plan):
                plan[request] = 1
            else:
                enough_pages = False
        return enough_pages, prefilling

    def _make_room(self, request: Request, num_tokens: int, plan: Plan) -> bool:
        """Reserve pages for `num_tokens` tokens, preempting requests later in the order if there are too few.

        Returns False if the request has to skip this step.
        """
        while not self.kv.reserve(request, num_tokens):
            if self._leaving or self.kv.num_returning_pages or self._running[-1] is request:
                return False  # pages will come back by themselves, or a request before this one has to end first
            victim = self._running[-1]
            plan.pop(victim, None)
            self._preempt(victim)
        return True

    def _admit_waiting(self, plan: Plan, budget: PromptBudget, new_requests: list[NewRequest]) -> None:
        """Admit waiting requests in the policy's order until slots, pages or the budget run out."""
        self._publish_running()
        computing = [request for request, count in plan.items() if self._computes_prompt(request, count)]
        growth = sum(self._expected_pages(request) - len(request.page_ids) for request in self._running)
        for request in self._policy.order(self._waiting, self.kv.cached_tokens):
            if not self._free_slots or budget.most(0) < (WORTH_SEARCHING if budget.is_shared else 1):
                break
            if not request.may_sample:
                continue
            match = self.kv.match(request)
            if self._is_being_computed(request, match, computing):
                continue
            count = budget.chunk(match.num_tokens, request.num_tokens - match.num_tokens)
            if count == 0:  # there may be shorter ones behind it
                continue
            fits = self._expected_to_fit(request, match, growth)
            if not (fits and self.kv.admit(request, match, match.num_tokens + count)):
                self._is_full = True
                break
            self._start(request, new_requests)
            growth += self._expected_pages(request) - len(request.page_ids)
            self._plan_chunk(plan, budget, request, count)
            computing.append(request)

    def _publish_running(self) -> None:
        """Publish the pages that running requests have filled. Only a match needs that, so it is not done earlier."""
        for request in self._running:
            if not self.kv.is_invalid(request):
                self.kv.commit(request, self._counters.steps)
        self._free_replaced()

    def _computes_prompt(self, request: Request, count: int) -> bool:
        return count > 1 or request.num_computed_tokens < len(request.prompt_ids)

    def _is_being_computed(self, request: Request, match: Match, computing: list[Request]) -> bool:
        """Whether a request of this step computes a longer part of the same prefix than the cache has.

        Waiting then saves work. It ends: in each step for which this returns True, the other request advances.
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
        """Pages that the request will hold when it ends, if its answer is as long as answers have been on average."""
        left = max(self.expected_output - len(request.output_ids), self._page_size)
        return self.kv.pages_for(min(request.num_known_tokens + int(left), request.max_num_tokens - 1))

    def _expected_to_fit(self, request: Request, match: Match, growth: int) -> bool:
        """Whether the request fits if it and all running requests, which still grow by `growth` pages, are average."""
        if not self._running:
            return True  # alone it always fits
        needed = self._expected_pages(request) - match.num_locked_pages
        return needed + growth <= self.kv.num_available_pages

    def _start(self, request: Request, new_requests: list[NewRequest]) -> None:
        """Move an admitted request from waiting to running and give it a slot."""
        self._policy.admitted(request, self._waiting)
        self._remove(self._waiting, request)
        insort(self._running, request, key=self._policy.sort_key)
        request.status = RequestStatus.RUNNING
        request.slot = self._free_slots.pop()
        new_requests.append(self._new_request(request, request.slot))
        request.prompt_logprobs = []  # after a preemption they are computed again
        if not request.was_admitted:
            request.was_admitted = True
            request.num_cached_tokens = request.num_computed_tokens
            self._counters.prompt_tokens += len(request.prompt_ids)
            self._counters.cached_tokens += request.num_cached_tokens

    def _new_request(self, request: Request, slot: int) -> NewRequest:
        token_ids = request.token_ids if request.output_ids else request.prompt_ids
        params = request.params
        if params.prompt_logprobs is not None and not request.wants_prompt_logprobs:
            params = msgspec.structs.replace(params, prompt_logprobs=None)
        ends = sorted(request.stop_ids) if params.min_tokens else []
        return NewRequest(slot, token_ids, len(request.prompt_ids), params, request.seed, ends)

    def _make_batch(self, plan: Plan, new_requests: list[NewRequest], drafts: Drafts) -> ScheduledBatch:
        """Turn the plan into a batch. Its tokens count as computed from here on; full prompt pages are published."""
        self._counters.count_step(sum(plan.values()))
        step = self._counters.steps
        new_pages, copies = self.kv.take_changes()
        rows, masks = [], {}
        for request, count in plan.items():
            start, num_tokens = request.num_computed_tokens, request.num_tokens
            end = request.num_computed_tokens = start + count
            samples = end - num_tokens + 1 if end >= num_tokens else 0
            if samples > 1:
                request.num_drafted = samples - 1
            assert request.slot is not None
            rows.append(Row(request.slot, start, count, samples))
            if samples and request.is_constrained:
                masks[request.slot] = request.masks[:samples]
            request.last_step = step
            if start < len(request.prompt_ids) or (count > 1 and count > samples):
                self.kv.commit(request, step, tail=samples > 0)
                self._is_full = False  # a waiting request may begin with what this one computes
        by_slot = {request.slot: draft for request, draft in drafts.items() if request.slot is not None}
        batch = ScheduledBatch(step, rows, new_requests, new_pages, copies, masks, by_slot)
        self._unread.append(UnreadStep(batch, list(plan), self._preempted))
        self._preempted = []
        return batch

    # -- after a step -------------------------------------------------------------------------------------------------

    def update(self, batch: ScheduledBatch, result: StepResult) -> StepOutputs:
        """Take in what the oldest launched step sampled, and return what each request gained.

        Raises ValueError if `batch` is not the oldest launched step, or if `result` cannot be its result.
        """
        if not self._unread or self._unread[0].batch is not batch:
            raise ValueError(f"step {batch.step} is not the oldest launched step")
        launched = self._unread.popleft()
        outputs = self._take_tokens(launched, result)
        self._note_read_steps()
        return outputs

    def _note_read_steps(self) -> None:
        for request in list(self._leaving):
            self._leave(request)
        self._free_replaced()

    def _free_replaced(self) -> None:
        """Free pages that were exchanged for cached ones and that no launched step uses any more.

        Call it too after exchanging pages outside of a step: there may be no step left whose end would do it.
        """
        self.kv.steps_read(self._unread[0].batch.step - 1 if self._unread else self._counters.steps)

    def _take_tokens(self, launched: UnreadStep, result: StepResult) -> StepOutputs:
        """Append the sampled tokens to their requests, but for requests that have ended or restart."""
        batch = launched.batch
        num_samples = sum(row.samples for row in batch.rows)
        if not len(result.token_ids) == len(result.logprobs) == num_samples:
            raise ValueError(f"step {batch.step} samples {num_samples} tokens, not {len(result.token_ids)}")
        if result.prompt_logprobs:
            for row, request in zip(batch.rows, launched.requests, strict=True):
                request.prompt_logprobs += result.prompt_logprobs.get(row.slot, ())
        outputs = StepOutputs([], [], [])
        if batch.drafts:
            self._take_runs(launched, result, outputs)
        else:
            sampling = [request for row, request in zip(batch.rows, launched.requests, strict=True) if row.samples]
            for request, token_id, logprobs in zip(sampling, result.token_ids, result.logprobs, strict=True):
                if request.status is not RequestStatus.FINISHED and request not in self._restarting:
                    self._take_token(request, token_id, logprobs, outputs)
        self._counters.generated_tokens += outputs.num_tokens
        return outputs

    def _take_runs(self, launched: UnreadStep, result: StepResult, outputs: StepOutputs) -> None:
        """`_take_token` where a request may gain several: up to the first that was not drafted, or ends the answer."""
        end = 0
        for row, request in zip(launched.batch.rows, launched.requests, strict=True):
            begin, end = end, end + row.samples
            token_ids, gained = result.token_ids[begin:end], []
            if row.samples > 1:
                draft = result.drafts.get(row.slot) or launched.batch.drafts[row.slot]
                token_ids = verify(request, row.start, draft, token_ids, self._gate)
                self.kv.shrink(request, request.num_computed_tokens)
            for token_id, logprobs in zip(token_ids, result.logprobs[begin:end], strict=False):
                if request.status is not RequestStatus.FINISHED and request not in self._restarting:
                    gained.append(StepOutputs([], [], []))
                    self._take_token(request, token_id, logprobs, gained[-1])
            add_run(outputs, gained)

    def _take_token(
        self, request: Request, token_id: int, logprobs: TokenLogprobs | None, outputs: StepOutputs
    ) -> None:
        """Append a token. It goes into `outputs.token_ids`, or into `others` if the request has more to report."""
        is_first = not request.output_ids
        prompt_logprobs = request.prompt_logprobs if request.wants_prompt_logprobs else None
        request.output_ids.append(token_id)
        reason = None
        if token_id in request.stop_ids:
            reason = FinishReason.STOP
        elif request.num_known_tokens >= request.max_num_tokens:
            reason = FinishReason.LENGTH
        elif not is_first and logprobs is None and not request.is_constrained:
            outputs.request_ids.append(request.request_id)
            outputs.token_ids.append(token_id)
            return
        if reason is not None:
            self._end(request, reason)
        outputs.others.append(
            TokenOutput(
                request_id=request.request_id,
                token_ids=[token_id],
                logprobs=None if logprobs is None else [logprobs],
                prompt_logprobs=prompt_logprobs,
                finish_reason=reason,
                stop_token_id=token_id if reason is FinishReason.STOP else None,
                num_cached_tokens=request.num_cached_tokens,
            )
        )

    def fail(self, batch: ScheduledBatch, error: str) -> StepOutputs:
        """End every request of a step whose launch or read raised; all others live on.

        The pages that the step should have filled are unpublished. Requests in later steps may have read them; those
        start again from the tokens known so far.
        """
        index = next((i for i, launched in enumerate(self._unread) if launched.batch is batch), None)
        if index is None:
            raise ValueError(f"step {batch.step} was not launched, or was read before")
        failed, later = self._unread[index], list(self._unread)[index + 1 :]
        del self._unread[index]
        for launched in [failed, *later]:
            for row, request in zip(launched.batch.rows, launched.requests, strict=True):
                self.kv.invalidate(request, row.start)
        outputs = []
        for request in failed.requests:
            steps = [launched.batch.step for launched in self._unread if request in launched.requests]
            request.last_step = max(steps, default=0)
            if request.status is not RequestStatus.FINISHED:
                outputs.append(self._end_without_token(request, FinishReason.ERROR, error))
        for request in [*self._running, *self._leaving]:
            if request.status is not RequestStatus.FINISHED and self.kv.is_invalid(request):
                self._restart(request)
        for request in self._running:
            self.kv.resend_page_table(request)
        self._note_read_steps()
        return StepOutputs(others=outputs)

    def _restart(self, request: Request) -> None:
        """Let a request start again from its known tokens; what launched steps sample for it is void."""
        if self._is_in_flight(request):
            self._restarting[request] = None
        if request.status is RequestStatus.RUNNING:
            self._preempt(request)

    # -- looking ------------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether any request has not ended, or any launched step was not read."""
        return bool(self._requests or self._unread)

    @property
    def next_step(self) -> int:
        """The number of the step that is scheduled next."""
        return self._counters.steps + 1

    @property
    def latest_step(self) -> UnreadStep:
        """The step that was scheduled last. It has not been read yet."""
        return self._unread[-1]

    def stats(self) -> SchedulerStats:
        """Return the figures of this moment. O(waiting requests)"""
        kv, counters = self.kv, self._counters
        free, cached = kv.num_free_pages, kv.num_cached_pages
        return SchedulerStats(
            num_running=len(self._running),
            num_waiting=len(self._requests) - len(self._running),
            num_waiting_tokens=sum(request.num_tokens for request in self._waiting),
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
            num_step_tokens=counters.step_tokens,
            step_sizes=list(counters.step_sizes),
            drafts=None if self._gate is None else self._gate.stats(),
        )

    def flush_cache(self) -> int:
        """Evict every cached page that no request holds, and return their number."""
        return self.kv.flush()

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
            raise RuntimeError(f"requests neither wait, run nor leave: {missing}")
        for name, requests in (("waiting", self._waiting), ("running", self._running)):
            keys = [self._policy.sort_key(request) for request in requests]
            if keys != sorted(set(keys)):
                raise RuntimeError(f"the {name} requests are not in order: {keys}")
        for request in with_slot:
            self._check_steps(request)

    def _check_steps(self, request: Request) -> None:
        """Check a request's counters against the launched steps that contain it and the tokens they sample for it."""
        known, last_step = request.num_known_tokens, request.last_step
        steps = [launched for launched in self._unread if request in launched.requests]
        oldest = self._unread[0].batch.step if self._unread else self._counters.steps + 1
        if max((launched.batch.step for launched in steps), default=oldest - 1) != max(last_step, oldest - 1):
            raise RuntimeError(f"request {request.request_id} is not in step {last_step}, or in a later one too")
        rows = [row for launched in steps for row in launched.batch.rows]
        samples = sum(row.samples for row in rows if row.slot == request.slot)
        if request.status is RequestStatus.RUNNING and samples != request.num_tokens - known:
            raise RuntimeError(
                f"request {request.request_id} has computed {request.num_computed_tokens} tokens; {samples} are to come"
            )
