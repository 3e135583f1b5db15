"""uvicorn around the app, on a socket that it is given. It says on stdout where it serves, and handles no signals."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import logging
import math
import socket
from collections.abc import Generator
from typing import cast

import uvicorn

from mini_sglang.ipc.async_engine import AsyncEngine
from mini_sglang.server.app import create_app
from mini_sglang.server.config import ServerConfig
from mini_sglang.server.intake import Connection, max_connections
from mini_sglang.server.listener import address_of

logger = logging.getLogger(__name__)


class HttpServer(uvicorn.Server):
    """uvicorn without its own signal handlers: whoever runs it sets `should_exit`."""

    def __init__(self, engine: AsyncEngine, config: ServerConfig, listener: socket.socket) -> None:
        self.app = create_app(engine, engine.tokenizer, config)
        timeout = math.ceil(config.shutdown_timeout_s) + 1  # one second for the errors when the engine is closed
        protocol = functools.partial(Connection, limits=config, most=max_connections())
        super().__init__(
            uvicorn.Config(
                self.app,
                http=cast(type[asyncio.Protocol], protocol),
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="warning",  # when it starts and stops is said already
                access_log=False,  # the app has its own, with the time that an answer took
                ssl_certfile=config.ssl_certfile,
                ssl_keyfile=config.ssl_keyfile,
                timeout_keep_alive=math.ceil(config.idle_timeout_s),
                timeout_graceful_shutdown=timeout,
            )
        )
        scheme = "http" if config.ssl_certfile is None else "https"
        self._greeting = f"Serving {engine.info.model} at {scheme}://{address_of(config, listener.getsockname()[1])}"

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        # Full collections halt every stream, with hundreds of them for 40 ms. So they skip the objects that live as
        # long as the server, and run once in about a thousand requests.
        gc.freeze()
        gc.set_threshold(*gc.get_threshold()[:2], 50)
        try:
            print(self._greeting, flush=True)
        except OSError as error:  # a full disk or a pipe that nobody reads: no reason not to serve
            logger.warning("%s (which cannot be written to stdout: %s)", self._greeting, error)
