"""Bounds what arriving requests take of the server before a route sees them: the bytes of a head, and how many begin in
one turn of the event loop, so that many at once delay no stream. Does not look at the requests.
"""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 1 << 16
REQUESTS_PER_TURN = 4  # to begin a request takes about a millisecond


class BoundedHttp(HttpToolsProtocol):
    """uvicorn's HTTP/1.1, whose parser would collect headers without end.

    Answers 400 and closes the connection when request line and headers exceed MAX_HEAD_BYTES.
    """

    _head_bytes = 0  # received since the last part of a body, or since the last request ended

    def data_received(self, data: bytes) -> None:
        self._head_bytes += len(data)
        super().data_received(data)
        if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response(f"Request line and headers may take at most {MAX_HEAD_BYTES} bytes.")

    def on_body(self, body: bytes) -> None:
        self._head_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._head_bytes = 0
        super().on_message_complete()


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
