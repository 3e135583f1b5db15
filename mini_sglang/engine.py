"""The engine: schedule, launch, update. It knows requests and tokens, no text and no sockets.

One loop serves every mode. With `run_ahead` 0 a step is read as soon as it was launched; with 1 the next step is
scheduled and launched first, so that the host works while the device does.
"""

from __future__ import annotations

import logging
import random
from collections import deque

from mini_sglang.config import EngineConfig
from mini_sglang.execution.executor import Executor, StepHandle, is_lost
from mini_sglang.request import FinishReason, Request, SamplingParams, StepOutputs
from mini_sglang.scheduling.batch import ScheduledBatch
from mini_sglang.scheduling.scheduler import Scheduler, SchedulerStats

logger = logging.getLogger(__name__)


class Engine:
    """Runs requests to their end. `config` has every `auto` resolved."""

    def __init__(self, config: EngineConfig) -> None:
        self.executor = Executor(config)
        self.config = self.executor.config
        self.model_config = self.executor.model_config
        self.scheduler = Scheduler(self.config)
        self._run_ahead = self.config.run_ahead or 0
        self._inflight: deque[tuple[ScheduledBatch, StepHandle]] = deque()
        self._random = random.Random()

    def add_request(
        self,
        request_id: str,
        prompt_ids: list[int],
        params: SamplingParams,
        *,
        cache_salt: str = "",
        priority: int = 0,
    ) -> None:
        """Queue a request. Raises ValueError, naming the field, if it is malformed or can never fit."""
        vocab_size = self.model_config.vocab_size
        params.validate(vocab_size)
        if not prompt_ids:
            raise ValueError("prompt must hold at least one token, got none")
        if min(prompt_ids) < 0 or max(prompt_ids) >= vocab_size:
            bad = next(i for i in prompt_ids if not 0 <= i < vocab_size)
            raise ValueError(f"prompt token ids must be between 0 and {vocab_size - 1}, got {bad}")
        seed = params.seed if params.seed is not None else self._random.getrandbits(63)
        self.scheduler.add(
            Request(
                request_id=request_id,
                prompt_ids=prompt_ids,
                params=params,
                eos_token_ids=self.model_config.eos_token_ids,
                cache_salt=cache_salt,
                priority=priority,
                seed=seed,
            )
        )

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> None:
        """End a request at once, wherever it stands; an unknown id is ignored, since it may just have ended."""
        self.scheduler.abort(request_id, reason)

    def step(self) -> StepOutputs:
        """Launch the next step if there is one, then read the oldest step that is due.

        An error of a step ends its requests, and is raised only where it leaves devices on which no other can run.
        """
        batch = self.scheduler.schedule()
        if batch is not None:
            try:
                self._inflight.append((batch, self.executor.launch(batch)))
            except Exception as error:  # a failed step must not take the engine down with the other requests
                return self._fail(batch, error)
        if self._inflight and (batch is None or len(self._inflight) > self._run_ahead):
            batch, handle = self._inflight.popleft()
            try:
                result = handle.result()
            except Exception as error:
                return self._fail(batch, error)
            return self.scheduler.update(batch, result)
        return StepOutputs()

    def _fail(self, batch: ScheduledBatch, error: Exception) -> StepOutputs:
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

    def close(self) -> None:
        """Release the model and the pool. The engine cannot be used afterwards."""
        self._inflight.clear()
        self.executor.close()
