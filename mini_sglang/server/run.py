"""Runs engine and HTTP server together until a signal or the engine's end, and leaves no process behind.

SIGINT, SIGTERM ──▶ stop listening, let requests end for up to `shutdown_timeout_s`, close the engine: 0
                    (requests that still run then get an error)
POST /drain     ──▶ take no new work, and when all requests have ended do the same: 0
a second signal ──▶ stop at once: 130
engine dead     ──▶ its requests have got an error; stop: 1
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.util
import logging
import os
import signal
import socket
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvloop

from mini_sglang.collector import no_collections
from mini_sglang.config import EngineConfig
from mini_sglang.ipc.launch import launch
from mini_sglang.server.config import ServerConfig
from mini_sglang.server.listener import bind, listen
from mini_sglang.server.request_log import LOG_FORMAT, RequestIdFilter
from mini_sglang.weights.hub import ModelSource, find_model

if TYPE_CHECKING:  # what takes long to import is, once the engine's process runs
    from mini_sglang.ipc.async_engine import AsyncEngine
    from mini_sglang.server.context import ServerContext

logger = logging.getLogger(__name__)

API_KEY_VARIABLE = "MINI_SGLANG_API_KEY"  # of the environment
EXIT_FAILED = 1
EXIT_INTERRUPTED = 130
ENGINE_CLOSE_S = 1.0  # time for the engine process to end by itself


def serve(engine_config: EngineConfig, server_config: ServerConfig) -> int:
    """Serve until a signal comes or the engine ends, and return the exit status. Only the main thread gets signals.

    Raises OSError if the address is taken. Raises ValueError or OSError if the certificate does not fit its key, the
    file or the variable of API keys holds none, packages that an option needs are not installed, or no model has this
    name.
    """
    handler = logging.StreamHandler()
    handler.addFilter(RequestIdFilter())
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT, handlers=[handler])
    server_config = with_all_keys(server_config, os.environ)
    _check_certificate(server_config)
    check_tracing(server_config)
    with bind(server_config) as listener:  # first: an address in use is known before a model is fetched and loaded
        # Fetched here, not in the event loop: Ctrl-C still stops a long download.
        source = find_model(engine_config)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_serve(engine_config, source, server_config, listener))


async def _serve(
    engine_config: EngineConfig, source: ModelSource, server_config: ServerConfig, listener: socket.socket
) -> int:
    signals = _Signals()
    starting = asyncio.create_task(_start(engine_config, source))
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


async def _start(config: EngineConfig, source: ModelSource) -> AsyncEngine:
    """Start the engine's process first: what it imports and what this one imports takes seconds each."""
    launched = await launch(config)
    try:
        async_engine = await asyncio.to_thread(_import_the_rest)
    except BaseException:
        await launched.kill()
        raise
    return await async_engine.join(launched, source)


def _import_the_rest() -> type[AsyncEngine]:
    """Import what `_serve_engine` needs too, while there is time."""
    with no_collections():
        importlib.import_module("mini_sglang.server.http_server")
        from mini_sglang.ipc.async_engine import AsyncEngine

    return AsyncEngine


async def _serve_engine(engine: AsyncEngine, config: ServerConfig, listener: socket.socket, signals: _Signals) -> int:
    from mini_sglang.server.http_server import HttpServer

    server = HttpServer(engine, config, listener)
    listen(listener, config)
    serving = asyncio.create_task(server.serve([listener]))
    context: ServerContext = server.app.state.context
    died = asyncio.create_task(engine.wait_dead())
    drained = asyncio.create_task(context.drained.wait())
    await _any_of(serving, died, drained, signals.first)
    if drained.done():
        logger.info("drained; stopping")
    if died.done():
        server.config.timeout_graceful_shutdown = 1  # nothing to wait for but errors on their way out
    server.should_exit = True
    context.stop()
    await _any_of(serving, signals.second, timeout=config.shutdown_timeout_s)
    if not serving.done() and not signals.second.done():
        closing = asyncio.create_task(engine.close(ENGINE_CLOSE_S))  # requests that still run get an error
        await _any_of(serving, signals.second)
        await closing
    if not serving.done():
        return EXIT_INTERRUPTED  # whatever still runs is cancelled with the event loop
    await serving
    await context.close()
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


def check_tracing(config: ServerConfig) -> None:
    """Raise ValueError if spans are asked for and the packages that make them are not installed."""
    if config.otlp_traces_endpoint is None:
        return
    try:
        found = importlib.util.find_spec("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    except ModuleNotFoundError:  # not even what it is part of
        found = None
    if found is None:
        raise ValueError("otlp_traces_endpoint needs OpenTelemetry's packages: pip install 'mini-sglang[otel]'")


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
