"""HTTP/1.1 POST over kept-alive connections, with the arrival time of every piece of the answer.

Made for thousands of streams on one core: sockets are asyncio's, parsing is httptools', and a piece of a stream costs
one callback, no task and no decoding. Knows nothing of what bodies say.
"""

from __future__ import annotations

import asyncio
import os
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from urllib.parse import urlsplit

import httptools

NOT_CONNECTED = "connect: "  # begins the error of an exchange for which no connection could be opened
_MAX_IDLE_S = 2.0  # a connection idle for longer is not used again: the server may be about to close it


@dataclass(slots=True)
class Exchange:
    """A request and its answer. Times are those of `time.perf_counter`, in seconds."""

    started: float  # before a connection was opened, if that was needed
    ended: float = 0.0
    status: int = 0
    chunks: list[tuple[float, bytes]] = field(default_factory=list)  # when it came, and a piece of the body
    error: str | None = None  # why there is no whole answer: connect, timeout or disconnected

    @property
    def body(self) -> bytes:
        return b"".join(chunk for _, chunk in self.chunks)


class HttpClient:
    """Sends to one server, on as many connections as there are requests under way. Belongs to one running event loop.

    Raises ValueError for a URL that is none.
    """

    def __init__(self, url: str, headers: Mapping[str, str] | None = None, *, timeout_s: float = 600.0) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"url must be like http://127.0.0.1:8000, got {url!r}")
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        self._host, self._port = parts.hostname, parts.port or (443 if self._ssl else 80)
        self._prefix = parts.path.rstrip("/")
        lines = {"host": parts.netloc.rpartition("@")[2], "accept": "*/*", **(headers or {})}
        self._head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        self._timeout_s = timeout_s
        self._idle: list[_Connection] = []
        self._connecting: set[asyncio.Task[None]] = set()

    def get(self, path: str) -> asyncio.Future[Exchange]:
        return self._send("GET", path, b"")

    def post(self, path: str, body: bytes) -> asyncio.Future[Exchange]:
        """Send a JSON body, at once if a connection is idle. The exchange says what went wrong; nothing is raised.

        Some servers close a connection without having said so. Where an idle one turns out to be closed before anything
        of the answer has come, the request is sent again, once, on a new one.
        """
        return self._send("POST", path, body)

    def _send(self, method: str, path: str, body: bytes) -> asyncio.Future[Exchange]:
        head = (
            f"{method} {self._prefix}{path} HTTP/1.1\r\n{self._head}"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        exchange = Exchange(started=time.perf_counter())
        answer: asyncio.Future[Exchange] = asyncio.get_running_loop().create_future()
        data = head.encode() + body
        connection = self._take(exchange.started)
        if connection is not None:
            again = partial(self._send_on_new, data, exchange, answer)
            connection.send(data, exchange, answer, self._timeout_s, again)
        else:
            self._send_on_new(data, exchange, answer)
        return answer

    def _send_on_new(self, data: bytes, exchange: Exchange, answer: asyncio.Future[Exchange]) -> None:
        task = asyncio.create_task(self._connect_and_send(data, exchange, answer))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    def _take(self, now: float) -> _Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if now - connection.idle_since < _MAX_IDLE_S and not connection.is_closed:
                return connection
            connection.close()
        return None

    async def _connect_and_send(self, data: bytes, exchange: Exchange, answer: asyncio.Future[Exchange]) -> None:
        connecting = asyncio.get_running_loop().create_connection(
            lambda: _Connection(self._idle), self._host, self._port, ssl=self._ssl
        )
        try:
            _, connection = await asyncio.wait_for(connecting, self._timeout_s)
        except (OSError, TimeoutError) as error:
            exchange.error = "timeout" if isinstance(error, TimeoutError) else f"{NOT_CONNECTED}{_reason(error)}"
            exchange.ended = time.perf_counter()
            answer.set_result(exchange)
        else:
            connection.send(data, exchange, answer, self._timeout_s)

    def close(self) -> None:
        """Close idle connections; those with a request under way close when it ends."""
        while self._idle:
            self._idle.pop().close()


def _reason(error: OSError) -> str:
    """In the system's words, without address and port, so that errors of a kind read the same."""
    if error.errno is not None and error.errno > 0:
        return os.strerror(error.errno)
    return error.strerror or type(error).__name__


class _Connection(asyncio.Protocol):
    """One connection, one exchange at a time; goes back to `idle` by itself."""

    def __init__(self, idle: list[_Connection]) -> None:
        self._idle = idle
        self._parser = httptools.HttpResponseParser(self)
        self._exchange: Exchange | None = None
        self._again: Callable[[], None] | None = None  # until something of the answer has come
        self._now = 0.0
        self._has_length = False
        self.idle_since = 0.0
        self.is_closed = False

    def send(
        self,
        data: bytes,
        exchange: Exchange,
        answer: asyncio.Future[Exchange],
        timeout_s: float,
        again: Callable[[], None] | None = None,
    ) -> None:
        """`again` is called in place of an answer where this connection turns out to have been closed before."""
        self._exchange, self._answer, self._again = exchange, answer, again
        self._has_length = False
        self._timeout = asyncio.get_running_loop().call_later(timeout_s, self._fail, "timeout")
        self._transport.write(data)

    def close(self) -> None:
        self.is_closed = True
        self._transport.close()

    # What asyncio calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: asyncio.Transport = transport  # type: ignore[assignment]  # a stream's

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        self._again = None
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"bad HTTP: {error}")

    def connection_lost(self, error: Exception | None) -> None:
        self.is_closed = True
        if self._again is not None and self._exchange is not None:
            self._exchange = None
            self._timeout.cancel()
            self._again()
        elif self._exchange is not None:
            self._now = time.perf_counter()
            ends_by_closing = self._exchange.status and not self._has_length and error is None
            self._finish(None if ends_by_closing else "disconnected")

    # What httptools calls.

    def on_header(self, name: bytes, value: bytes) -> None:
        self._has_length = self._has_length or name.lower() in (b"content-length", b"transfer-encoding")

    def on_headers_complete(self) -> None:
        if self._exchange is not None:
            self._exchange.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        if self._exchange is not None:
            self._exchange.chunks.append((self._now, body))

    def on_message_complete(self) -> None:
        if self._exchange is None or self._exchange.status < 200:  # an interim answer
            return
        keep = self._parser.should_keep_alive()
        self._finish(None)
        if keep:
            self.idle_since = self._now
            self._idle.append(self)
        else:
            self.close()

    def _fail(self, reason: str) -> None:
        self._now = time.perf_counter()
        self._finish(reason)
        self.is_closed = True
        self._transport.abort()

    def _finish(self, error: str | None) -> None:
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            self._timeout.cancel()
            exchange.ended, exchange.error = self._now, error
            if not self._answer.done():
                self._answer.set_result(exchange)
