"""What happens to requests before a route is looked for: connections are bounded in time, number and in what a client
leaves half done; each request waits for its turn of the event loop, so that many at once delay no stream; and what HTTP
lets a client write in two ways becomes one.

head, body ──▶ must arrive in time, or the answer is 408; an idle connection is closed
answered early ──▶ what the client still sends is read and dropped for a while, or a reset would take the answer along
all descriptors in use ──▶ the connection that has been idle longest makes room

Does not look at bodies, and knows no routes but /health and /ready, which always get through.
"""

from __future__ import annotations

import asyncio
import re
import resource
import socket
import sys
from typing import Any

import h11
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.flow_control import CLOSE_HEADER, HIGH_WATER_LIMIT
from uvicorn.protocols.http.h11_impl import H11Protocol

from mini_sglang.server.config import ServerConfig
from mini_sglang.server.errors import ApiError, error_response
from mini_sglang.server.request_log import request_id_of

MAX_HEAD_BYTES = 1 << 16
MIN_BODY_BYTES_PER_S = 1000  # a body that comes at this rate has all the time that it needs
MAX_CONNECTIONS = 8192
RESERVED_DESCRIPTORS = 128  # for everything but connections
LINGER_S = 10.0  # for which the rest of a request is dropped after its answer
LINGER_BYTES = 1 << 28
HALF_CLOSED_S = 2.0  # before a client that has ended its side is asked whether it still listens
PROBE_S = 0.5  # between asking and asking again
UNASKED_S = 30.0  # for which a plain answer is computed for a client that cannot be asked
_PROBE = b"HTTP/1.1 100 Continue\r\n\r\n"  # every client passes over it
_PROBES = ("/health", "/ready")
_ORIGIN = re.compile(r"^https?://[^/]*", re.IGNORECASE)  # before the path, as a client writes it to a proxy
REQUESTS_PER_TURN = 4  # to begin a request takes about a millisecond


def max_connections() -> int:
    """Raise the process's limit of open descriptors as far as it may, and tell how many connections fit below it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_CONNECTIONS + RESERVED_DESCRIPTORS
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    room = MAX_CONNECTIONS if soft == resource.RLIM_INFINITY else soft - RESERVED_DESCRIPTORS
    return max(16, min(MAX_CONNECTIONS, room))


class Connection(H11Protocol):
    """A connection of a server with these settings, one of at most `most`."""

    def __init__(self, *, limits: ServerConfig, most: int, **uvicorns: Any) -> None:
        super().__init__(**uvicorns)
        self.conn = h11.Connection(h11.SERVER, MAX_HEAD_BYTES)
        self._inner: ASGIApp = self.app
        self.app = self._answer
        self._seconds = {"head": limits.head_timeout_s, "body": limits.body_timeout_s}
        self._most = most
        self._is_extra = False  # all connections are at work, and this is one more
        self._owed: str | None = None  # what the client has to send next: "head" or "body"
        self._owed_since = self._quiet_since = self.loop.time()
        self._received = 0  # bytes of what is owed, or since the answer
        self._timer: asyncio.TimerHandle | None = None
        self._is_half_closed = False

    # Which connections there may be

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(_LingeringTransport(transport, self))  # type: ignore[arg-type]
        self._owe("head")
        if len(self.connections) > self._most:
            self._make_room()

    def _make_room(self) -> None:
        others = (other for other in self.connections if isinstance(other, Connection) and other is not self)
        idle = [other for other in others if not other._is_at_work and not other.transport.is_closing()]
        if idle:
            min(idle, key=lambda other: other._quiet_since).transport.abort()
        elif len(self.connections) > self._most + RESERVED_DESCRIPTORS // 2:
            self.transport.abort()
        else:
            self._is_extra = True

    @property
    def _is_at_work(self) -> bool:
        """Whether a request that has arrived is being answered."""
        return self._owed is None and self.cycle is not None and not self.cycle.response_complete

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        self._owe(None)

    # What arrives, and by when

    def data_received(self, data: bytes) -> None:
        self._received += len(data)
        if self.conn.their_state is h11.IDLE and not self.conn.trailing_data[0]:
            data = data.lstrip(b"\r\n")  # which some clients send behind a body
        if self._is_answered_early and self._received > LINGER_BYTES:
            self.transport.abort()
        elif data and not self.transport.is_closing():
            super().data_received(data)
            self._owe({h11.IDLE: "head", h11.SEND_BODY: "body"}.get(self.conn.their_state))
            if self._is_at_work and len(self.conn.trailing_data[0]) <= HIGH_WATER_LIMIT:
                self.flow.resume_reading()  # a pipelined request waits; but the end of the connection must be seen

    def on_response_complete(self) -> None:
        self._quiet_since = self.loop.time()
        self._received = 0
        super().on_response_complete()
        if self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]:
            self._owe("head")
        if self._is_half_closed and self.cycle.response_complete:
            self.transport.close()

    @property
    def _is_answered_early(self) -> bool:
        return self.transport.is_closing() or (self.cycle is not None and self.cycle.response_complete)

    def _owe(self, part: str | None) -> None:
        if part == self._owed:
            return  # the clock goes on
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._owed, self._owed_since, self._received = part, self.loop.time(), 0
        if part is not None:
            self._timer = self.loop.call_later(self._seconds[part], self._check_time, part)

    def _check_time(self, part: str) -> None:
        earned = self._received / MIN_BODY_BYTES_PER_S if part == "body" else 0.0
        left = self._owed_since + self._seconds[part] + earned - self.loop.time()
        if self.flow.read_paused:
            left = max(left, 1.0)  # it is the server that does not read
        if left > 0:
            self._timer = self.loop.call_later(left, self._check_time, part)
        elif part == "head" and not self.conn.trailing_data[0]:
            self.transport.close()  # nothing was asked
        else:
            self._refuse(408, f"the request's {part} did not arrive in time")

    def send_400_response(self, msg: str) -> None:
        """Answer what h11 has just refused."""
        refused = sys.exc_info()[1]
        if len(unread := self.conn.trailing_data[0]) > MAX_HEAD_BYTES:
            self._refuse(400 if b"\n" in unread else 414, _TOO_LONG)
        elif isinstance(refused, h11.RemoteProtocolError) and refused.error_status_hint == 501:
            self._refuse(501, str(refused))
        else:
            self._refuse(400, msg)

    def _refuse(self, status: int, message: str) -> None:
        """Answer in place of the app, and close."""
        begun: Scope = {"headers": []}
        if self.cycle is not None and not self.cycle.response_complete:
            begun = self.scope  # type: ignore[assignment]
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.abort()  # an answer has begun
            return
        response = _last_response(ApiError(status, message), begun)
        headers = [*self.server_state.default_headers, *response.raw_headers]
        for event in (
            h11.Response(status_code=status, headers=headers),
            h11.Data(bytes(response.body)),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    # A client that ends its side

    def eof_received(self) -> bool:  # type: ignore[override]
        """Go on with a whole request: the client may only have said that it is the last. But it may be gone, too.

        HTTP/1.0 has no interim answer to find out with, and behind it is most often a proxy, which has gone: a stream's
        parts will tell, and what takes long before it answers is given up. TLS ends both sides at once.
        """
        if self.scheme != "http" or not self._is_at_work or self.transport.is_closing():
            return False
        self._is_half_closed = True
        self.loop.call_later(HALF_CLOSED_S, self._probe)
        if self.scope["http_version"] == "1.0":
            self.loop.call_later(UNASKED_S, self._give_up)
        return True

    def _probe(self) -> None:
        """Send what a client passes over, unless an answer comes; the system of one that is gone sends a reset."""
        if self.transport.is_closing():
            return
        if self.transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()  # the reset has come, and nothing reads any more to see it
            return
        if not self.cycle.response_started and self.scope["http_version"] == "1.1":
            self.transport.write(_PROBE)
        self.loop.call_later(PROBE_S, self._probe)

    def _give_up(self) -> None:
        if not self.cycle.response_started:
            self.transport.close()

    # What is answered

    def _should_upgrade(self) -> bool:
        return False  # an offer, which the answer passes over

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the app. The parts of a chunked answer go past h11, which takes three times as long for each."""
        cycle = self.cycle
        is_chunked = False

        async def send_quickly(message: Message) -> None:
            nonlocal is_chunked
            if is_chunked and message.get("more_body"):
                if self.flow.write_paused and not cycle.disconnected:
                    await self.flow.drain()
                if (body := message["body"]) and not cycle.disconnected:
                    self.transport.write(b"%x\r\n%b\r\n" % (len(body), body))
                return
            await send(message)
            if message["type"] == "http.response.start":
                has_length = any(name == b"content-length" for name, _ in message["headers"])
                is_chunked = scope["http_version"] == "1.1" and scope["method"] != "HEAD" and not has_length

        _settle_length(scope)
        length = len(scope["raw_path"]) + len(scope["query_string"])
        if length + sum(len(name) + len(value) for name, value in scope["headers"]) > MAX_HEAD_BYTES:  # all at once
            too_long = ApiError(414 if length > MAX_HEAD_BYTES else 400, _TOO_LONG)
            await _last_response(too_long, scope)(scope, receive, send)
        elif self._is_extra and scope["path"] not in _PROBES:
            busy = ApiError(503, "the server has no room for another connection", code="too_many_connections")
            await _last_response(busy, scope)(scope, receive, send)
        else:
            await self._inner(scope, receive, send_quickly)


_TOO_LONG = f"Request line and headers may take at most {MAX_HEAD_BYTES} bytes."


def _last_response(error: ApiError, scope: Scope) -> Response:
    """The answer to a request that the app does not see. The connection closes behind it."""
    response = error_response(error)
    response.headers["connection"] = "close"
    response.headers["x-request-id"] = request_id_of(scope)
    return response


def _settle_length(scope: Scope) -> None:
    """Where a body has two lengths, drop the one that does not count, and close behind the answer.

    A proxy may have counted by the other one, and what follows would then be another client's.
    """
    names = {name for name, _ in scope["headers"]}
    if {b"transfer-encoding", b"content-length"} <= names:
        kept = [header for header in scope["headers"] if header[0] != b"content-length"]
        scope["headers"][:] = [*kept, CLOSE_HEADER]


class _LingeringTransport:
    """A transport whose `close` waits for a client that is still sending, within bounds.

    To close at once would reset the connection, and the client's system would drop the answer that it holds.
    """

    def __init__(self, transport: asyncio.Transport, connection: Connection) -> None:
        self._transport = transport
        self._connection = connection
        self._is_lingering = False
        self.write = transport.write

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        return self._is_lingering or self._transport.is_closing()

    def close(self) -> None:
        if self.is_closing():
            return
        if self._connection.conn.their_state not in (h11.SEND_BODY, h11.ERROR):
            self._transport.close()
            return
        self._is_lingering = True
        if self._transport.can_write_eof():
            self._transport.write_eof()
        self._connection.flow.resume_reading()
        asyncio.get_running_loop().call_later(LINGER_S, self._transport.abort)


class RequestPacer:
    """Lets `per_turn` callers of `wait` go on in each turn of the event loop, first come, first served."""

    def __init__(self, per_turn: int = REQUESTS_PER_TURN) -> None:
        self._places = asyncio.Semaphore(per_turn)

    async def wait(self) -> None:
        """Wait for a turn with room. Costs nothing while no other caller waits."""
        await self._places.acquire()
        asyncio.get_running_loop().call_soon(self._places.release)


class PacingMiddleware:
    """ASGI middleware: each request waits for its turn before it begins."""

    def __init__(self, app: ASGIApp, pacer: RequestPacer) -> None:
        self._app = app
        self._pacer = pacer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._pacer.wait()
        await self._app(scope, receive, send)


class PlainRequests:
    """ASGI middleware: HEAD is GET without the answer's body; neither a slash at the end of a path makes a difference
    nor a whole address in its place. OPTIONS for the whole server and CONNECT, which have no path, are answered here.

    A redirect to the path without it would lead to whatever address the client's Host header names.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_head(message: Message) -> None:
            await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        method, path = scope["method"], _ORIGIN.sub("", scope["path"], count=1) or "/"
        if method == "CONNECT":
            await error_response(ApiError(501, "this server is no proxy"))(scope, receive, send)
        elif (method, path) == ("OPTIONS", "*"):
            await Response(status_code=204, headers={"allow": "GET, HEAD, POST, OPTIONS"})(scope, receive, send)
        else:
            is_head = method == "HEAD"
            plain = {**scope, "method": "GET" if is_head else method, "path": path.rstrip("/") or "/"}
            try:
                await self._app(plain, receive, send_head if is_head else send)
            finally:
                scope["route"] = plain.get("route")  # which the log counts by
