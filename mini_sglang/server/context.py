"""The context that the routes of one server share: the engine, the tokenizer, the settings and the metrics."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from fastapi import Request

from mini_sglang.config import ServerConfig
from mini_sglang.errors import shorten
from mini_sglang.ipc.messages import EngineInfo
from mini_sglang.outputs import RequestOutput
from mini_sglang.sampling_params import SamplingParams
from mini_sglang.scheduling.scheduler import SchedulerStats
from mini_sglang.server.admission import Admission
from mini_sglang.server.answers.model_format import ModelFormat
from mini_sglang.server.errors import ApiError
from mini_sglang.server.intake import RequestPacer
from mini_sglang.server.metrics import ServerMetrics
from mini_sglang.text.tokenizer import Tokenizer


class ServingEngine(Protocol):
    """The part of AsyncEngine that a server needs; see the docstrings there."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def request_ids(self) -> list[str]: ...

    def generate(
        self,
        prompt_ids: list[int],
        params: SamplingParams,
        *,
        request_id: str,
        cache_salt: str = "",
        priority: int = 0,
        client: str = "",
    ) -> AsyncGenerator[RequestOutput, None]: ...

    def abort(self, request_id: str) -> bool: ...

    async def ping(self) -> None: ...

    async def stats(self) -> SchedulerStats: ...

    async def flush_cache(self) -> int: ...

    async def start_trace(self, num_steps: int | None = None) -> None: ...

    async def stop_trace(self) -> str: ...


@dataclass(frozen=True)
class ServerContext:
    """The state of one server."""

    engine: ServingEngine
    tokenizer: Tokenizer
    config: ServerConfig
    jobs: dict[str, list[str]] = field(default_factory=dict)  # running jobs: the engine's request ids by the job's id
    pacer: RequestPacer = field(default_factory=RequestPacer)
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    waits: set[asyncio.Timeout] = field(default_factory=set)  # for the rest of a body
    created: int = field(default_factory=lambda: int(time.time()))  # Unix time
    started: float = field(default_factory=time.monotonic)  # the same moment, on a clock that never jumps

    @functools.cached_property
    def metrics(self) -> ServerMetrics:
        return ServerMetrics(self.model_name)

    @functools.cached_property
    def admission(self) -> Admission:
        """The places for requests."""
        running = self.engine.info.max_running_requests
        return Admission(running, self.config.max_waiting_requests, has_shares=len(self.config.api_key) > 1)

    @functools.cached_property
    def model_format(self) -> ModelFormat:
        """How the model writes reasoning and tool calls."""
        return ModelFormat.of(self.tokenizer, self.config)

    @property
    def model_names(self) -> tuple[str, ...]:
        """The names that clients know the model by."""
        return self.config.served_model_name or (self.shown_model,)

    @functools.cached_property
    def shown_model(self) -> str:
        """The model's name, or the last part of the path to it: clients need not know this machine's folders."""
        path = Path(self.engine.info.model).expanduser()
        return path.resolve().name if path.is_absolute() or path.exists() else self.engine.info.model

    @property
    def model_name(self) -> str:
        """The first of the names."""
        return self.model_names[0]

    def check_model(self, name: str | None) -> str:
        """The name to answer with: `name`, or the first one if it is None. Raises ApiError 404 for other names."""
        if name is None:
            return self.model_name
        is_path = name == self.engine.info.model and not self.config.served_model_name
        if name not in self.model_names and not is_path:
            served = ", ".join(map(repr, self.model_names))
            message = f"model {shorten(name)} does not exist; this server serves {served}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return name

    @contextlib.asynccontextmanager
    async def unless_stopping(self) -> AsyncGenerator[None, None]:
        """A block that waits for a client; when the server stops, the wait ends with ApiError 503."""
        try:
            async with asyncio.timeout(0 if self.stopping.is_set() else None) as wait:
                self.waits.add(wait)
                try:
                    yield
                finally:
                    self.waits.discard(wait)
        except TimeoutError:
            raise ApiError(503, "the server is stopping", code="stopping") from None

    def stop(self) -> None:
        """End the waits for clients, since the server stops."""
        self.stopping.set()
        for wait in self.waits:
            wait.reschedule(0)


def context_of(request: Request) -> ServerContext:
    """The context of the app that serves this request."""
    context: ServerContext = request.app.state.context
    return context
