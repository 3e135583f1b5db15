"""A replica: one engine in a process of its own, and the server's app around it, which answers requests of the ingress.

engine dead ──▶ its streams get an error; the replica takes no request any more, and ends once they have been told.
                Ray starts another one.

It knows nothing of the other replicas, nor how a request found it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncGenerator

from ray import serve
from starlette.types import Message

from mini_sglang.config import EngineConfig
from mini_sglang.ipc.async_engine import AsyncEngine
from mini_sglang.ray_serve import in_process
from mini_sglang.ray_serve.combined import WholeAnswer
from mini_sglang.ray_serve.in_process import HttpRequest
from mini_sglang.server.app import create_app
from mini_sglang.server.config import ServerConfig

logger = logging.getLogger(__name__)

LAST_WORDS_S = 2.0  # for the errors of a dead engine's requests to be sent
NOTICING_S = 0.05  # that it takes to notice an engine's death after its requests have
SENDING_S = 0.2  # that what has been yielded takes to leave this process
REPLICA_HEADER = b"x-replica"  # of every answer: which replica it is from


class ReplicaLeavingError(Exception):
    """The replica's engine is dead. The request has not been looked at: another replica can answer it."""


class RequestLostError(Exception):
    """The replica's engine died with the request, of which nothing had been answered."""


class EngineReplica:
    """Answers requests with an engine of its own. Ray makes it, in a process of its own."""

    async def __init__(self, engine_config: EngineConfig, server_config: ServerConfig) -> None:  # type: ignore[misc]
        self._engine = await AsyncEngine.start(engine_config)
        self._app = create_app(self._engine, self._engine.tokenizer, server_config)
        self._name = serve.get_replica_context().replica_id.unique_id
        self._is_leaving = False
        self._num_running = 0
        self._watch = asyncio.create_task(self._leave_after_engine())

    async def answer(self, request: HttpRequest) -> AsyncGenerator[list[Message], None]:
        """Yield the ASGI messages of the answer. Raises ReplicaLeavingError or RequestLostError before the first."""
        if self._is_leaving:
            raise ReplicaLeavingError(self._name)
        self._num_running += 1
        try:
            async with contextlib.aclosing(in_process.answer(self._app, request)) as batches:
                async for batch in batches:
                    for message in batch:
                        if message["type"] == "http.response.start":
                            if message["status"] == 503 and await self._is_engine_dead():
                                raise RequestLostError(self._name)
                            message["headers"] = [*message["headers"], (REPLICA_HEADER, self._name.encode())]
                    yield batch
        finally:
            self._num_running -= 1

    async def answer_whole(self, request: HttpRequest) -> WholeAnswer | None:
        """The answer to one of the requests that all replicas get; None if the engine is dead."""
        start: Message = {"status": 500, "headers": []}
        body = b""
        try:
            async for batch in self.answer(request):
                for message in batch:
                    if message["type"] == "http.response.start":
                        start = message
                    body += message.get("body", b"")
        except (ReplicaLeavingError, RequestLostError):
            return None
        return WholeAnswer(self._name, start["status"], tuple(start["headers"]), body)

    async def check_health(self) -> None:
        """Raises EngineDeadError or TimeoutError if the engine does not answer: Ray then replaces the replica."""
        await self._engine.ping()

    async def __del__(self) -> None:
        """Ray calls it when the replica has answered what it had, and shall end."""
        if hasattr(self, "_watch"):  # else its engine has not started
            self._watch.cancel()
            await self._engine.close()
            await self._app.state.context.close()

    async def _is_engine_dead(self) -> bool:
        try:
            await asyncio.wait_for(self._engine.wait_dead(), NOTICING_S)
        except TimeoutError:
            return False
        return True

    async def _leave_after_engine(self) -> None:
        error = await self._engine.wait_dead()
        self._is_leaving = True
        logger.error("replica %s leaves: %s", self._name, error)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORDS_S):
                while self._num_running:
                    await asyncio.sleep(0.01)
        await asyncio.sleep(SENDING_S)
        await self._app.state.context.close()
        os._exit(1)
