"""The engine: schedule, launch, update. It knows requests and tokens, no text and no sockets.

One loop serves every mode. With `run_ahead` 0 a step is read as soon as it was launched; with 1 the next step is
scheduled and launched first, so that the host works while the device does.
"""

from __future__ import annotations

import logging
import random
from collections import deque
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING

from mini_sglang.config import EngineConfig
from mini_sglang.errors import FieldError
from mini_sglang.execution.executor import Executor, StepHandle, is_lost
from mini_sglang.grammar.compiler import GrammarCompiler, Vocabulary
from mini_sglang.grammar.masks import GrammarMasks
from mini_sglang.observability.observer import EngineObserver
from mini_sglang.observability.step_log import StepLog
from mini_sglang.outputs import FinishReason, StepOutputs, TokenOutput
from mini_sglang.request import Request
from mini_sglang.sampling_params import SamplingParams
from mini_sglang.scheduling.batch import ScheduledBatch
from mini_sglang.scheduling.scheduler import Scheduler, SchedulerStats
from mini_sglang.weights.hub import ModelSource

if TYPE_CHECKING:
    from mini_sglang.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_MASK_WAIT_S = 0.01  # with nothing to compute but masks; between such waits callers come to speak


class Engine:
    """Runs requests to their end. `config` has every `auto` resolved.

    The model's tokenizer serves grammars alone. Unless one is given, it is loaded with the first grammar.
    """

    def __init__(self, config: EngineConfig, tokenizer: Tokenizer | None = None) -> None:
        log = None if config.step_log is None else StepLog(config.step_log)  # a wrong path is known before loading
        self._observer = EngineObserver(log, config.profile_dir)
        self.executor = Executor(config)
        self.config = self.executor.config
        self.model_config = self.executor.model_config
        self.scheduler = Scheduler(self.config)
        self._run_ahead = self.config.run_ahead or 0
        self._inflight: deque[tuple[ScheduledBatch, StepHandle]] = deque()
        self._random = random.Random()
        model = self.model_config
        load = partial(_load_compiler, self.executor.source, tokenizer, model.vocab_size, model.eos_token_ids)
        self._masks = GrammarMasks(load)
        self._observer.started(asdict(self.config))

    def add_request(
        self,
        request_id: str,
        prompt_ids: list[int],
        params: SamplingParams,
        *,
        cache_salt: str = "",
        priority: int = 0,
    ) -> None:
        """Queue a request. Raises FieldError if it is malformed or can never fit."""
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
            seed=seed,
        )
        self.scheduler.add(request)
        self._observer.arrived(request_id, len(prompt_ids))
        if request.is_constrained:
            self._masks.add(request_id, params, request.max_num_tokens - len(prompt_ids))

    def check_grammar(self, params: SamplingParams) -> None:
        """Wait until a grammar is compiled, if `params` ask for one. Raises FieldError if it does not compile."""
        if params.is_constrained:
            self._masks.check(params)

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> None:
        """End a request at once, wherever it stands; an unknown id is ignored, since it may just have ended."""
        self.scheduler.abort(request_id, reason)
        self._masks.drop(request_id)
        self._observer.ended(request_id, reason)

    def step(self) -> StepOutputs:
        """Launch the next step if there is one, then read the oldest step that is due.

        An error of a step ends its requests, and is raised only where it leaves devices on which no other can run.
        """
        ended = self._take_masks() if self._masks else []
        outputs = self._launch_and_read()
        if self._masks:
            self._advance_masks(outputs)
        if ended:
            outputs = StepOutputs(outputs.request_ids, outputs.token_ids, [*ended, *outputs.others])
        self._observer.gave(outputs.others)
        return outputs

    def _launch_and_read(self) -> StepOutputs:
        """Launch the step that the scheduler wants, if it wants one; then read the oldest step, if that is due.

        It is due if more than `run_ahead` steps are on their way, or if there was none to launch. What launching or
        reading raises ends the requests of that step alone (`_fail`). With no step to read, wait a moment for masks if
        there are any.
        """
        observer = self._observer
        with observer.phase("schedule", self.scheduler.next_step):
            batch = self.scheduler.schedule()
        if batch is not None:
            observer.scheduled(batch, self.scheduler)
            try:
                with observer.phase("launch", batch.step):
                    self._inflight.append((batch, self.executor.launch(batch)))
            except Exception as error:  # a failed step must not take the engine down with the other requests
                return self._fail(batch, error)
        if self._inflight and (batch is None or len(self._inflight) > self._run_ahead):
            batch, handle = self._inflight.popleft()
            try:
                with observer.phase("wait", batch.step):
                    result = handle.result()
            except Exception as error:
                return self._fail(batch, error)
            with observer.phase("update", batch.step):
                outputs = self.scheduler.update(batch, result)
            observer.read(batch, handle.device_us)
            return outputs
        if self._masks:
            self._masks.wait(_MASK_WAIT_S)
        return StepOutputs()

    def _take_masks(self) -> list[TokenOutput]:
        """Let requests go on whose next mask is known; those whose grammar has come to its end end here."""
        outputs = []
        for ready in self._masks.take_ready():
            if ready.mask is not None:
                self.scheduler.set_mask(ready.request_id, ready.mask)
                continue
            self._masks.drop(ready.request_id)
            reason = FinishReason.STOP if ready.error is None else FinishReason.ERROR
            outputs.append(self.scheduler.end(ready.request_id, reason, ready.error, ready.error_field))
        return [output for output in outputs if output is not None]

    def _advance_masks(self, outputs: StepOutputs) -> None:
        """Follow the tokens of requests with a grammar, which are never among those that decode in every step."""
        for output in outputs.others:
            if output.finish_reason is not None:
                self._masks.drop(output.request_id)
            elif output.request_id in self._masks:
                for token_id in output.token_ids:
                    self._masks.advance(output.request_id, token_id)

    def _fail(self, batch: ScheduledBatch, error: Exception) -> StepOutputs:
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

    def check_ranks(self) -> None:
        """Raise RankError if a rank of tensor parallelism has failed since the last step."""
        self.executor.check()

    def check(self) -> None:
        """Raise RuntimeError, saying what is wrong, unless every page, slot and request is accounted for. O(pages)"""
        self.scheduler.check()

    def flush_cache(self) -> int:
        """Drop every cached page that no running request holds; returns how many."""
        return self.scheduler.flush_cache()

    def start_trace(self, num_steps: int | None = None) -> None:
        """Trace this process (rank 0) until `stop_trace`, or for `num_steps` steps, into a file in `profile_dir`.

        Raises ValueError without `profile_dir` or while a trace is being made, OSError if the folder cannot be made.
        """
        self._observer.start_trace(num_steps)

    def stop_trace(self) -> str:
        """End the trace, unless it has ended by itself; returns the path of its file, in Chrome's format.

        Raises ValueError if none was started, OSError if it could not be written.
        """
        return self._observer.stop_trace()

    def close(self) -> None:
        """Release the model and the pool. The engine cannot be used afterwards."""
        self._inflight.clear()
        self._masks.close()
        self.executor.close()
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
