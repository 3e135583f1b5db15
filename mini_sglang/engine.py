"""The engine's loop: schedule, launch, update. It knows requests and tokens, no text and no sockets.

One loop serves every mode. With `run_ahead` 0 a step is read as soon as it was launched; with 1 the next step is
scheduled and launched first, so that the host works while the device does.
"""

from __future__ import annotations

import logging
import random
import time
from collections import deque
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING

from mini_sglang.collector import no_collections
from mini_sglang.config import EngineConfig
from mini_sglang.errors import FieldError
from mini_sglang.execution.executor import Executor, StepHandle, is_lost
from mini_sglang.grammar.compiler import GrammarCompiler, Vocabulary
from mini_sglang.grammar.masks import GrammarMasks
from mini_sglang.observability.observer import EngineObserver, PhaseName
from mini_sglang.observability.step_log import StepLog
from mini_sglang.observability.summary import summary
from mini_sglang.outputs import FinishReason, StepOutputs, TokenOutput
from mini_sglang.request import Request
from mini_sglang.sampling_params import SamplingParams
from mini_sglang.scheduling.batch import ScheduledBatch
from mini_sglang.scheduling.kv_cache import CacheListener
from mini_sglang.scheduling.scheduler import Scheduler
from mini_sglang.scheduling.speculation import Proposer, make_gate
from mini_sglang.scheduling.stats import SchedulerStats
from mini_sglang.scheduling.step_cost import work_of
from mini_sglang.weights.hub import ModelSource

if TYPE_CHECKING:
    from mini_sglang.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_UNOBSERVED = nullcontext()
_MASK_WAIT_S = 0.01  # while only masks are computed; messages are read in between


class Engine:
    """Runs requests to their end. The attribute `config` is the argument with every `auto` resolved.

    The model's tokenizer serves grammars alone. Unless one is given, it is loaded with the first grammar. `source` is
    the model, if it was found before. A listener is told what the prefix cache holds. With a `proposer`, tokens are
    drafted by it, whatever `speculative` says. Raises ValueError if the configuration asks for events of the cache and
    nothing listens.
    """

    def __init__(
        self,
        config: EngineConfig,
        tokenizer: Tokenizer | None = None,
        *,
        source: ModelSource | None = None,
        cache_listener: CacheListener | None = None,
        proposer: Proposer | None = None,
    ) -> None:
        if config.kv_events_endpoint is not None and cache_listener is None:
            raise ValueError("kv_events_endpoint needs a server: only mini-sglang serve publishes events")
        log = None if config.step_log is None else StepLog(config.step_log)  # a wrong path is known before loading
        self._observer: EngineObserver | None = None  # None: nothing asks for logs or traces
        if log is not None or config.profile_dir is not None:
            self._observer = EngineObserver(log, config.profile_dir)
        if proposer is not None:
            config = config.replace(speculative="ngram")  # which the proposer stands in for, so that no model is loaded
        with no_collections():
            self.executor = Executor(config, source)
        self.config = self.executor.config
        self.model_config = self.executor.model_config
        self._cost = self.executor.step_cost
        self._cache_listener = cache_listener
        self._proposer = proposer
        self.scheduler = self._new_scheduler()
        self._run_ahead = self.config.run_ahead
        self._inflight: deque[tuple[ScheduledBatch, StepHandle, float]] = deque()  # and when it was launched
        self._read_s = 0.0  # when the last step was read
        self._random = random.Random()
        model = self.model_config
        load = partial(_load_compiler, self.executor.source, tokenizer, model.vocab_size, model.eos_token_ids)
        self._make_masks = partial(GrammarMasks, load, self.config.speculative_tokens)
        self._masks: GrammarMasks | None = None  # from the first grammar on
        self._arrived_s: dict[str, float] = {}  # arrival of each request that was in no step yet
        self._queued_s: dict[str, float] = {}  # how long each other one was queued, until an output says so
        if self._observer is not None:
            self._observer.started(asdict(self.config))
        for line in summary(self.config):
            logger.info(line)

    def _new_scheduler(self) -> Scheduler:
        gate = make_gate(self.config, self._cost, self.model_config.vocab_size, self._proposer)
        return Scheduler(self.config, self._cost, self._cache_listener, gate)

    def add_request(
        self,
        request_id: str,
        prompt_ids: list[int],
        params: SamplingParams,
        *,
        cache_salt: str = "",
        priority: int = 0,
        client: str = "",
    ) -> None:
        """Queue a request; clients take turns. Raises FieldError if it is malformed or can never fit."""
        vocab_size = self.model_config.vocab_size
        params.validate(vocab_size)
        if not prompt_ids:
            raise FieldError("prompt", "must hold at least one token, got none")
        if min(prompt_ids) < 0 or max(prompt_ids) >= vocab_size:
            bad = next(i for i in prompt_ids if not 0 <= i < vocab_size)
            raise FieldError("prompt", f"token ids must be between 0 and {vocab_size - 1}, got {bad}")
        seed = params.seed if params.seed is not None else self._random.getrandbits(63)
        request = Request(
            request_id=request_id,
            prompt_ids=prompt_ids,
            params=params,
            eos_token_ids=self.model_config.eos_token_ids,
            cache_salt=cache_salt,
            priority=priority,
            client=client,
            seed=seed,
        )
        self.scheduler.add(request)
        self._arrived_s[request_id] = time.perf_counter()
        if self._observer is not None:
            self._observer.arrived(request_id, len(prompt_ids))
        if request.is_constrained:
            self._all_masks().add(request_id, params, request.max_num_tokens - len(prompt_ids))

    def check_grammar(self, params: SamplingParams) -> None:
        """Wait until a grammar is compiled, if `params` ask for one. Raises FieldError if it does not compile."""
        if params.is_constrained:
            self._all_masks().check(params)

    def _all_masks(self) -> GrammarMasks:
        if self._masks is None:
            self._masks = self._make_masks()
        return self._masks

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> None:
        """End a request at once, wherever it stands; an unknown id is ignored, since it may just have ended."""
        self.scheduler.abort(request_id, reason)
        self._arrived_s.pop(request_id, None)
        self._queued_s.pop(request_id, None)
        if self._masks is not None:
            self._masks.drop(request_id)
        if self._observer is not None:
            self._observer.ended(request_id, reason)

    def step(self) -> StepOutputs:
        """Launch the next step if there is one, then read the oldest step that is due.

        An error of a step ends its requests, and is raised only where it leaves devices on which no other can run.
        """
        masks = self._masks
        ended = self._take_masks(masks) if masks else []
        outputs = self._launch_and_read()
        if masks:
            self._advance_masks(masks, outputs)
        if ended:
            outputs = StepOutputs(outputs.request_ids, outputs.token_ids, [*ended, *outputs.others])
        for output in outputs.others:
            output.queued_s = self._queued_s.pop(output.request_id, None)
            if output.finish_reason is not None:
                self._arrived_s.pop(output.request_id, None)
        if self._observer is not None:
            self._observer.emitted(outputs.others)
        return outputs

    def _launch_and_read(self) -> StepOutputs:
        """Launch the next step if the scheduler has one, then read the oldest step if it is due.

        It is due if more than `run_ahead` steps are in flight, or if there was none to launch. What launching or
        reading raises ends the requests of that step alone (`_fail`). With no step to read, wait a moment for masks if
        there are any.
        """
        with self._phase("schedule", self.scheduler.next_step):
            batch = self.scheduler.schedule()
        if batch is not None:
            self._record_admitted(batch)
            launched_s = time.perf_counter()
            try:
                with self._phase("launch", batch.step):
                    self._inflight.append((batch, self.executor.launch(batch), launched_s))
            except Exception as error:  # a failed step must not take the engine down with the other requests
                return self._fail(batch, error)
        if self._inflight and (batch is None or len(self._inflight) > self._run_ahead):
            batch, handle, launched_s = self._inflight.popleft()
            try:
                with self._phase("wait", batch.step):
                    result = handle.result()
            except Exception as error:
                return self._fail(batch, error)
            predicted_us = self._learn(batch, launched_s)
            with self._phase("update", batch.step):
                outputs = self.scheduler.update(batch, result)
            if self._observer is not None:
                self._observer.read(batch, handle.device_us, predicted_us, outputs=outputs)
            return outputs
        if self._masks:
            self._masks.wait(_MASK_WAIT_S)
        return StepOutputs()

    def _learn(self, batch: ScheduledBatch, launched_s: float) -> int | None:
        """Correct the prediction of steps by one that was just read; it began when the one before it had ended.

        Returns what was predicted, in microseconds, if steps are bounded or drafts weighed.
        """
        if self._cost is None:
            return None
        began_s, self._read_s = max(launched_s, self._read_s), time.perf_counter()
        drafts = batch.num_model_drafts if batch.drafts else 0
        return round(self._cost.learn(work_of(batch.rows), (self._read_s - began_s) * 1e6, drafts))

    def _phase(self, name: PhaseName, step: int) -> AbstractContextManager[object]:
        """Context of one phase of a step, which the observer, if there is one, times and names in traces."""
        return _UNOBSERVED if self._observer is None else self._observer.phase(name, step)

    def _record_admitted(self, batch: ScheduledBatch) -> None:
        """Record how long those requests were queued whose first step is `batch`, the latest one."""
        if batch.new_requests:
            now = time.perf_counter()
            for request_id in self.scheduler.latest_step.admitted:
                if (arrived := self._arrived_s.pop(request_id, None)) is not None:
                    self._queued_s[request_id] = now - arrived
        if self._observer is not None:
            self._observer.scheduled(batch, self.scheduler)

    def _take_masks(self, masks: GrammarMasks) -> list[TokenOutput]:
        """Give the scheduler the masks that are ready; end the requests whose grammar is complete or has failed."""
        outputs = []
        for ready in masks.take_ready():
            if (ahead := ready.ahead) is not None:
                self.scheduler.set_masks(ready.request_id, ahead.masks, ahead.draft, ahead.forced)
                continue
            masks.drop(ready.request_id)
            reason = FinishReason.STOP if ready.error is None else FinishReason.ERROR
            outputs.append(self.scheduler.end(ready.request_id, reason, ready.error, ready.error_field))
        return [output for output in outputs if output is not None]

    def _advance_masks(self, masks: GrammarMasks, outputs: StepOutputs) -> None:
        """Follow the tokens of requests with a grammar, which are never among the columns."""
        for output in outputs.others:
            if output.finish_reason is not None:
                masks.drop(output.request_id)
            elif output.request_id in masks:
                masks.advance(output.request_id, output.token_ids, self.scheduler.propose(output.request_id))

    def _fail(self, batch: ScheduledBatch, error: Exception) -> StepOutputs:
        if self._observer is not None:
            self._observer.read(batch, error=f"{type(error).__name__}: {error}")
        if is_lost(error):
            raise error
        logger.exception("step %d failed", batch.step, exc_info=error)
        return self.scheduler.fail(batch, f"{type(error).__name__}: {error}")

    @property
    def has_work(self) -> bool:
        """Whether a call of `step` would do anything."""
        return bool(self._inflight) or self.scheduler.has_work

    def stats(self) -> SchedulerStats:
        return self.scheduler.stats()

    def check_workers(self) -> None:
        """Raise RankError if a rank of tensor parallelism has failed since the last step."""
        self.executor.check()

    def check(self) -> None:
        """Raise RuntimeError, saying what is wrong, unless every page, slot and request is accounted for. O(pages)"""
        self.scheduler.check()

    def flush_cache(self) -> int:
        """Drop every cached page that no running request holds; returns how many."""
        return self.scheduler.flush_cache()

    def reset(self) -> None:
        """Forget all requests, without outputs, and all cached pages: for when an exception tore a step apart.

        Not for engines with several ranks: the others may be in the middle of a step that nobody will finish.
        """
        if self._observer is not None:
            self._observer.ended_all(FinishReason.ABORT)
        if self._masks is not None:
            self._masks.close()
            self._masks = None
        self._inflight.clear()
        self._arrived_s.clear()
        self._queued_s.clear()
        self.scheduler = self._new_scheduler()

    def start_trace(self, num_steps: int | None = None) -> None:
        """Trace this process (rank 0) until `stop_trace`, or for `num_steps` steps, into a file in `profile_dir`.

        Raises ValueError without `profile_dir` or while a trace is being made, OSError if the folder cannot be made.
        """
        self._tracing_observer().start_trace(num_steps)

    def stop_trace(self) -> str:
        """End the trace, unless it has ended by itself; returns the path of its file, in Chrome's format.

        Raises ValueError if none was started, OSError if it could not be written.
        """
        return self._tracing_observer().stop_trace()

    def _tracing_observer(self) -> EngineObserver:
        if self._observer is None:
            raise ValueError("profile_dir must be set for traces: start the engine with --profile-dir DIR")
        return self._observer

    def close(self) -> None:
        """Release the model and the pool. The engine cannot be used afterwards."""
        self._inflight.clear()
        if self._masks is not None:
            self._masks.close()
        self.executor.close()
        if self._observer is not None:
            self._observer.close()


def _load_compiler(
    source: ModelSource, tokenizer: Tokenizer | None, vocab_size: int, eos_token_ids: frozenset[int]
) -> GrammarCompiler:
    """Imported here: transformers, which only a tokenizer needs, takes a second."""
    if tokenizer is None:
        from mini_sglang.text.tokenizer import load_tokenizer

        tokenizer = load_tokenizer(source)
    vocabulary = Vocabulary.of(tokenizer, vocab_size, eos_token_ids)
    return GrammarCompiler(vocabulary, partial(tokenizer.encode, add_special_tokens=False))
