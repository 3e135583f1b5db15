"""A scripted engine with the interface of AsyncEngine, and an app around it: what the protocol does, without a model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Any, NamedTuple

import pytest
from fastapi.testclient import TestClient

from mini_sglang.config import ServerConfig
from mini_sglang.messages import EngineInfo
from mini_sglang.output_processor import OutputProcessor
from mini_sglang.request import FinishReason, RequestOutput, SamplingParams, TokenLogprobs, TokenOutput
from mini_sglang.scheduling.scheduler import SchedulerStats
from mini_sglang.server.app import create_app
from mini_sglang.tokenizer import Tokenizer

CONTEXT_LENGTH = 512
POOL_TOKENS = 400


class Call(NamedTuple):
    """What a route asked of the engine."""

    request_id: str
    prompt_ids: list[int]
    params: SamplingParams
    cache_salt: str
    priority: int


class ScriptedEngine:
    """Answers every prompt with `tokens`, one at a time, honouring limits, stop strings and ignore_eos.

    `pause_after` tokens it waits until the request is aborted or left; `error` is raised where it should have answered.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.tokens = [*tokenizer.encode("Hello there, dear friend."), min(tokenizer.eos_token_ids)]
        self.pause_after: int | None = None
        self.fail_after: int | None = None
        self.error: Exception | None = None
        self.calls: list[Call] = []
        self.left_early: list[str] = []
        self.running: dict[str, asyncio.Event] = {}
        self.info = EngineInfo(
            model="scripted",
            dtype="float32",
            device="cpu",
            vocab_size=tokenizer.vocab_size,
            context_length=CONTEXT_LENGTH,
            page_size=16,
            num_pages=POOL_TOKENS // 16,
            max_prompt_tokens=POOL_TOKENS,
            max_running_requests=4,
            eos_token_ids=sorted(tokenizer.eos_token_ids),
            pid=0,
        )

    @property
    def request_ids(self) -> list[str]:
        return list(self.running)

    @property
    def num_requests(self) -> int:
        return len(self.running)

    async def generate(
        self,
        prompt_ids: list[int],
        params: SamplingParams,
        *,
        request_id: str,
        cache_salt: str = "",
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput, None]:
        self.calls.append(Call(request_id, prompt_ids, params, cache_salt, priority))
        if self.error is not None:
            raise self.error
        processor = OutputProcessor(self.tokenizer, request_id, len(prompt_ids), params)
        aborted = self.running[request_id] = asyncio.Event()
        finished = False
        try:
            while not finished:
                count = len(processor.generated_ids) if hasattr(processor, "generated_ids") else self._count(processor)
                if count == self.pause_after:
                    await aborted.wait()
                await asyncio.sleep(0)
                output = processor.push(self._next(request_id, count, params, aborted.is_set()))
                finished = output.finished
                yield output
        finally:
            del self.running[request_id]
            if not finished:
                self.left_early.append(request_id)
