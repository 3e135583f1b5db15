"""Runs engine and HTTP server together until a signal or the engine's end, and leaves no process behind.

SIGINT, SIGTERM ──▶ stop listening, let requests end for up to `shutdown_timeout_s`, close the engine: 0
                    (requests that still run then get an error)
a second signal ──▶ stop at once: 130
engine dead     ──▶ its requests have got an error; stop: 1
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import functools
import gc
import logging
import math
import os
import signal
import socket
import ssl
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any, cast

import uvicorn

from mini_sglang.config import EngineConfig, ServerConfig
from mini_sglang.ipc.async_engine import AsyncEngine
from mini_sglang.server.app import create_app
from mini_sglang.server.context import ServerContext
from mini_sglang.server.intake import Connection, max_connections
from mini_sglang.server.request_log import LOG_FORMAT, RequestIdFilter
from mini_sglang.weights.hub import find_model

logger = logging.getLogger(__name__)

API_KEY_VARIABLE = "MINI_SGLANG_API_KEY"  # of the environment
EXIT_FAILED = 1
EXIT_INTERRUPTED = 130
ENGINE_CLOSE_S = 1.0  # time for the engine process to end by itself
_BACKLOG = 2048  # connections that wait to be accepted, the same as uvicorn's


def serve(engine_config: EngineConfig, server_config: ServerConfig) -> int:
    """Serve until a signal comes or the engine ends, and return the exit status. Only the main thread gets signals.

    Raises OSError if the address is taken. Raises ValueError or OSError if the certificate does not fit its key, the
    file or the variable of API keys holds none, or no model has this name.
    """
    handler = logging.StreamHandler()
    handler.addFilter(RequestIdFilter())
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT, handlers=[handler])
    server_config = with_all_keys(server_config, os.environ)
    _check_certificate(server_config)
    with _bind(server_config) as listener:  # first: an address in use is known before a model is fetched and loaded
        # Fetched here, not in the event loop: Ctrl-C still stops a long download.
        find_model(engine_config)
        with asyncio.Runner(loop_factory=uvicorn.Config("", log_config=None).get_loop_factory()) as runner:
            return runner.run(_serve(engine_config, server_config, listener))


async def _serve(engine_config: EngineConfig, server_config: ServerConfig, listener: socket.socket) -> int:
    signals = _Signals()
    starting = asyncio.create_task(AsyncEngine.start(engine_config))
    await _any_of(starting, signals.first)
    if not starting.done():
        starting.cancel()
        await asyncio.wait((starting,))
        return EXIT_INTERRUPTED
    try:
        engine = starting.result()
    except RuntimeError as error:
        logger.error("%s", error)
        return EXIT_FAILED
    try:
        return await _serve_engine(engine, server_config, listener, signals)
    finally:
        await engine.close(0 if signals.second.done() else ENGINE_CLOSE_S)


async def _serve_engine(engine: AsyncEngine, config: ServerConfig, listener: socket.socket, signals: _Signals) -> int:
    server = HttpServer(engine, config, listener)
    _listen(listener, config)
    serving = asyncio.create_task(server.serve([listener]))
    died = asyncio.create_task(engine.wait_dead())
    await _any_of(serving, died, signals.first)
    if died.done():
        server.config.timeout_graceful_shutdown = 1  # nothing to wait for but errors on their way out
    server.should_exit = True
    context: ServerContext = server.app.state.context
    context.stop()
    await _any_of(serving, signals.second, timeout=config.shutdown_timeout_s)
    if not serving.done() and not signals.second.done():
        closing = asyncio.create_task(engine.close(ENGINE_CLOSE_S))  # requests that still run get an error
        await _any_of(serving, signals.second)
        await closing
    if not serving.done():
        return EXIT_INTERRUPTED  # whatever still runs is cancelled with the event loop
    await serving
    return EXIT_FAILED if died.done() else 0


async def _any_of(*futures: asyncio.Future[Any], timeout: float | None = None) -> None:
    """Wait until one of the futures is done, at most for `timeout` seconds."""
    await asyncio.wait(futures, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)


class _Signals:
    """The first and the second SIGINT or SIGTERM, as futures."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.first: asyncio.Future[None] = loop.create_future()
        self.second: asyncio.Future[None] = loop.create_future()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._note)

    def _note(self) -> None:
        if not self.first.done():
            logger.info("stopping; once more to stop at once")
            self.first.set_result(None)
        elif not self.second.done():
            self.second.set_result(None)


class HttpServer(uvicorn.Server):
    """uvicorn without its own signal handlers, which `_Signals` replaces."""

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
                access_log=False,  # the app has its own, with the time that an answer took
                ssl_certfile=config.ssl_certfile,
                ssl_keyfile=config.ssl_keyfile,
                timeout_keep_alive=math.ceil(config.idle_timeout_s),
                timeout_graceful_shutdown=timeout,
            )
        )
        scheme = "http" if config.ssl_certfile is None else "https"
        self._greeting = f"Serving {engine.info.model} at {scheme}://{_address(config, listener.getsockname()[1])}"

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


def with_all_keys(config: ServerConfig, environment: Mapping[str, str]) -> ServerConfig:
    """Add the keys in `api_key_file` and in the environment, which white space separates, to `api_key`.

    Raises ValueError if the file or the variable holds no key: the server must not open without one. Raises OSError or
    ValueError if the file cannot be read.
    """
    keys = list(config.api_key)
    if config.api_key_file is not None:
        keys += _keys_in(f"api_key_file {config.api_key_file}", Path(config.api_key_file).read_text(encoding="utf-8"))
    if API_KEY_VARIABLE in environment:
        keys += _keys_in(f"the environment's {API_KEY_VARIABLE}", environment[API_KEY_VARIABLE])
    return dataclasses.replace(config, api_key=tuple(keys))


def _keys_in(place: str, text: str) -> list[str]:
    if not (keys := text.split()):
        raise ValueError(f"{place} must hold an API key, got none; leave it out to serve without keys")
    return keys


def _check_certificate(config: ServerConfig) -> None:
    """Check the certificate's files before a model is loaded. Raises ValueError or OSError."""
    if config.ssl_certfile is None:
        return
    for name in filter(None, (config.ssl_certfile, config.ssl_keyfile)):
        Path(name).open("rb").close()  # an error with the file's name, which ssl leaves out
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile, password="")  # never ask for a password
    except ssl.SSLError as error:
        raise ValueError(
            f"ssl_certfile and ssl_keyfile must be a PEM certificate and its key without a password: {error}"
        ) from error


def _bind(config: ServerConfig) -> socket.socket:
    """Make a socket that holds the address but does not listen yet."""
    listener = socket.socket(socket.AF_INET6 if ":" in config.host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((config.host, config.port))
    except OSError as error:
        listener.close()
        raise _refused(config, error) from error
    return listener


def _listen(listener: socket.socket, config: ServerConfig) -> None:
    """Listen before uvicorn does: with uvloop it reports no error if another server has come to listen there."""
    try:
        listener.listen(_BACKLOG)
    except OSError as error:
        raise _refused(config, error) from error


def _refused(config: ServerConfig, error: OSError) -> OSError:
    """The system's error about the address, and the option that chooses another."""
    taken = error.errno in (errno.EADDRINUSE, errno.EACCES)  # the latter for ports below 1024
    advice = "choose another --port (0: a free one)" if taken else "--host must be an address of this machine"
    return OSError(f"cannot listen at {_address(config, config.port)}: {error.strerror or error}; {advice}")


def _address(config: ServerConfig, port: int) -> str:
    return f"[{config.host}]:{port}" if ":" in config.host else f"{config.host}:{port}"
