"""Any sequence of arrivals, steps, aborts and failures: right outputs, every page accounted for, nothing stuck."""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from mini_sglang.config import ResolvedConfig
from mini_sglang.outputs import FinishReason
from mini_sglang.request import Request
from mini_sglang.sampling_params import SamplingParams
from mini_sglang.scheduling.simulation import Simulation, generate
from mini_sglang.scheduling.speculation import Gate
from mini_sglang.scheduling.step_cost import StepCost

# Prompts that share beginnings: cut from a few long sequences, with a different end now and then.
PROMPTS = st.builds(
    lambda stem, length, end: ([(stem * i * i + i) % 3 for i in range(60)][:length] + end) or [0],
    stem=st.integers(0, 2),
    length=st.integers(0, 50),
    end=st.lists(st.integers(0, 2), max_size=4),
)


class Guesses:
    """Drafts what a request will get, of which each token is right with a probability of `accuracy`."""

    def __init__(self, accuracy: float) -> None:
        self.accuracy = accuracy
        self._random = random.Random(0)

    def propose(self, request: Request, most: int) -> list[int]:
        known = len(request.output_ids)
        answer = generate(request.prompt_ids, request.seed, known + most, vocab_size=3)
        right = [self._random.random() < self.accuracy for _ in range(most)]
        drafted = [token if kept else (token + 1) % 3 for token, kept in zip(answer[known:], right, strict=True)]
        return drafted[: self._random.randint(0, most)]

    def forget(self, request: Request) -> None:
        pass


class SchedulerMachine(RuleBasedStateMachine):
    """A whole engine on a simulated executor, which finds every cell that is not what a request must see there."""

    failures = False

    @initialize(
        run_ahead=st.integers(0, 2),
        page_size=st.sampled_from([1, 2, 3, 4, 8]),
        pool_tokens=st.integers(8, 120),
        context_length=st.integers(12, 100),
        slots=st.integers(1, 6),
        budget=st.sampled_from([1, 2, 7, 64]),
        cache=st.sampled_from(["radix", "radix", "radix", "naive"]),
        schedule=st.sampled_from(["fcfs", "lpm", "priority"]),
        expected_output=st.sampled_from([0.0, 0.0, 128.0]),  # 0: admits so boldly that many are preempted
        mask_delay=st.integers(0, 2),
        step_ms=st.sampled_from([0, 0, 1, 5]),
        drafts=st.sampled_from([None, Guesses(0.0), Guesses(0.5), Guesses(0.9), Guesses(1.0)]),
        most_drafted=st.integers(1, 8),
    )
    def start(
        self,
        run_ahead: int,
        page_size: int,
        pool_tokens: int,
        context_length: int,
        slots: int,
        budget: int,
        cache: str,
        schedule: str,
        expected_output: float,
        mask_delay: int,
        step_ms: int,
        drafts: Guesses | None,
        most_drafted: int,
    ) -> None:
        # steps that cost so much themselves that nearly any draft pays, and one is tried again soon
        cost = StepCost(step=200 if drafts is None else 20_000, decode=50, context=1, token=100, pair=1)
        self.simulation = Simulation(
            ResolvedConfig(
                page_size=page_size,
                num_pages=max(pool_tokens // page_size, 1),
                context_length=context_length,
                max_running_requests=slots,
                max_prefill_tokens=budget,
                cache=cache,  # type: ignore[arg-type]
                schedule=schedule,  # type: ignore[arg-type]
                run_ahead=run_ahead,
                max_step_ms=step_ms,
            ),
            mask_delay=mask_delay,
            cost=cost,
            gate=None if drafts is None else Gate(drafts, most_drafted, cost, hesitates=run_ahead > 0),
        )
        self.simulation.scheduler.expected_output = expected_output
        self.context_length = context_length
        self.pool_tokens = max(pool_tokens // page_size, 1) * page_size
        self.ended: set[str] = set()

    @rule(
        prompt=PROMPTS,
        max_tokens=st.one_of(st.none(), st.integers(1, 30)),
        eos=st.sampled_from([frozenset(), frozenset(), frozenset([2])]),
        salt=st.sampled_from([0, 0, 0, 1]),
        priority=st.integers(0, 2),
        client=st.sampled_from(["", "", "a", "b"]),
        prompt_logprobs=st.sampled_from([None, None, None, 0]),
        copies=st.sampled_from([1, 1, 1, 4]),
        regex=st.sampled_from([None, None, "a*"]),  # some requests have a grammar
    )
    def add(
        self,
        prompt: list[int],
        max_tokens: int | None,
        eos: frozenset[int],
        salt: int,
        priority: int,
        client: str,
        prompt_logprobs: int | None,
        copies: int,
        regex: str | None,
    ) -> None:
        for _ in range(copies):
            request = Request(
                request_id=str(len(self.simulation.requests)),
                prompt_ids=prompt,
                params=SamplingParams(max_tokens=max_tokens, prompt_logprobs=prompt_logprobs, regex=regex),
                eos_token_ids=eos,
                cache_salt=str(salt),
                seed=salt,
                priority=priority,
                client=client,
            )
            if len(prompt) >= self.context_length or len(prompt) > self.pool_tokens:
                with pytest.raises(ValueError, match=f"^prompt has {len(prompt)} tokens"):
                    self.simulation.add(request)
            else:
                self.simulation.add(request)

    @rule(count=st.integers(1, 8))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.simulation.step()
            self.simulation.scheduler.check()

    @rule(launch=st.booleans(), chance=st.integers(0, 3))
    def fail(self, launch: bool, chance: int) -> None:
        if self.failures and chance == 0:
            self.simulation.step(fail_launch=launch, fail_read=not launch)
        else:
            self.simulation.step()

    @rule(which=st.integers(0, 1000), reason=st.sampled_from([FinishReason.ABORT, FinishReason.STOP]))
    def abort(self, which: int, reason: FinishReason) -> None:
        if self.simulation.requests:
            request_id = str(which % len(self.simulation.requests))
            self.ended.add(request_id)
            self.simulation.scheduler.abort(request_id, reason)

    @rule()
    def flush(self) -> None:
        self.simulation.scheduler.flush_cache()
        assert self.simulation.scheduler.stats().num_cached_pages == 0

    @invariant()
    def is_sound(self) -> None:
        if hasattr(self, "simulation"):
            self.simulation.scheduler.check()
            self.simulation.check_outputs()

    def teardown(self) -> None:
        if not hasattr(self, "simulation"):
            return
        simulation = self.simulation
        simulation.run(max_steps=20_000)
        simulation.scheduler.check()
        simulation.check_outputs()
        stats = simulation.scheduler.stats()
        assert stats.num_running == stats.num_waiting == stats.num_used_pages == 0
        assert stats.num_finished + stats.num_aborted == len(simulation.requests)
        assert simulation.finished.keys() | self.ended == simulation.requests.keys()
        for request_id, reason in simulation.finished.items():
            self.ended_rightly(simulation.requests[request_id], reason)
        simulation.scheduler.flush_cache()
        assert simulation.scheduler.stats().num_free_pages == stats.num_pages

    def ended_rightly(self, request: Request, reason: FinishReason) -> None:
        if reason is FinishReason.ERROR:
            return
        limit = min(self.context_length, self.pool_tokens + 1)
        if request.params.max_tokens is not None:
            limit = min(limit, len(request.prompt_ids) + request.params.max_tokens)
        ends = [i for i, token in enumerate(request.output_ids) if token in request.eos_token_ids]
        if reason is FinishReason.STOP:
            assert ends == [len(request.output_ids) - 1]
        else:
            assert reason is FinishReason.LENGTH
            assert not ends
            assert len(request.prompt_ids) + len(request.output_ids) == limit


class FailingSchedulerMachine(SchedulerMachine):
    """The same where steps fail now and then, on launch or when they are read."""

    failures = True


def test_any_history_gives_the_right_outputs_and_loses_no_page(stateful: settings) -> None:
    run_state_machine_as_test(SchedulerMachine, settings=stateful)


def test_failed_steps_end_their_own_requests_and_spoil_no_other(stateful: settings) -> None:
    run_state_machine_as_test(FailingSchedulerMachine, settings=stateful)
