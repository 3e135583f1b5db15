"""HTTP requests to one server, with the arrival time of every chunk of the answers.

aiohttp does the work. This module says how: as many connections as there are requests under way, no redirects, no
decompression, and an exchange that names what went wrong. It knows nothing of what bodies say.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Self
from urllib.parse import urlsplit

import aiohttp

NOT_CONNECTED = "connect: "  # begins the error of an exchange for which no connection could be opened
_MAX_IDLE_S = 2.0  # a connection idle for longer is not used again: the server may be about to close it


@dataclass(slots=True)
class Exchange:
    """A request and its answer. Times are those of `time.perf_counter`, in seconds."""

    started: float  # before a connection was opened, if that was needed
    ended: float = 0.0
    status: int = 0
    chunks: list[tuple[float, bytes]] = field(default_factory=list)  # when it came, and a piece of the body
    error: str | None = None  # why there is no whole answer: connect, timeout, bad HTTP or disconnected

    @property
    def body(self) -> bytes:
        return b"".join(chunk for _, chunk in self.chunks)


class HttpClient:
    """Sends requests to one server. An async context manager, made and used in one running event loop.

    Raises ValueError for a URL that is none.
    """

    def __init__(self, url: str, headers: Mapping[str, str] | None = None, *, timeout_s: float = 600.0) -> None:
        parts = urlsplit(url)
        # reading the port raises ValueError where it is no port
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:
            raise ValueError(f"url must be like http://127.0.0.1:8000, got {url!r}")
        self._base = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path.rstrip('/')}"
        self._timeout_s = timeout_s
        tracing = aiohttp.TraceConfig()
        tracing.on_connection_reuseconn.append(_note_reuse)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_MAX_IDLE_S),
            headers={"content-type": "application/json", **(headers or {})},
            skip_auto_headers=("user-agent", "accept-encoding"),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(),  # none: `_send` has one for all attempts together
            auto_decompress=False,
            trace_configs=[tracing],
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def get(self, path: str) -> Exchange:
        return await self._send("GET", path)

    async def post(self, path: str, body: bytes) -> Exchange:
        """Send a JSON body. The exchange says what went wrong; nothing is raised.

        Some servers close a connection without having said so. Where an idle one turns out to be closed before anything
        of the answer has come, the request is sent again on another.
        """
        return await self._send("POST", path, body)

    async def _send(self, method: str, path: str, body: bytes | None = None) -> Exchange:
        exchange = Exchange(started=time.perf_counter())
        try:
            async with asyncio.timeout(self._timeout_s):
                while not await self._attempt(exchange, method, path, body):
                    pass
        except TimeoutError:
            exchange.error = "timeout"
        except aiohttp.ClientConnectorError as error:
            exchange.error = f"{NOT_CONNECTED}{_reason(error.os_error)}"
        except aiohttp.ClientResponseError as error:
            exchange.error = "bad HTTP: " + error.message.partition(":\n")[0]  # below is the offending line
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError):
            exchange.error = "disconnected"
        exchange.ended = time.perf_counter()
        return exchange

    async def _attempt(self, exchange: Exchange, method: str, path: str, body: bytes | None) -> bool:
        """Fill in the answer; False if the connection was an idle one that the server had closed."""
        connection = SimpleNamespace(is_reused=False)
        try:
            async with self._session.request(
                method, f"{self._base}{path}", data=body, allow_redirects=False, trace_request_ctx=connection
            ) as response:
                exchange.status = response.status
                async for chunk in response.content.iter_any():
                    exchange.chunks.append((time.perf_counter(), chunk))
        except aiohttp.ClientConnectionError:
            if not connection.is_reused or exchange.status:
                raise
            return False
        return True


async def _note_reuse(
    session: aiohttp.ClientSession, context: SimpleNamespace, params: aiohttp.TraceConnectionReuseconnParams
) -> None:
    context.trace_request_ctx.is_reused = True


def _reason(error: OSError) -> str:
    """In the system's words, without address and port, so that errors of a kind read the same."""
    if error.errno is not None and error.errno > 0:
        return os.strerror(error.errno)
    return error.strerror or type(error).__name__
