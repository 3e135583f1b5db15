"""What happens to every request before a route is looked for: it waits for its turn of the event loop, so that many at
once delay no stream, and what HTTP lets a client write in two ways becomes one. Does not look at bodies.
"""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

REQUESTS_PER_TURN = 4  # to begin a request takes about a millisecond


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
    """ASGI middleware: HEAD is GET without the answer's body, and a slash at the end of a path makes no difference.

    A redirect to the path without it would lead to whatever address the client's Host header names.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_head(message: Message) -> None:
            await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

        is_head = scope["type"] == "http" and scope["method"] == "HEAD"
        if is_head:
            scope = {**scope, "method": "GET"}
        if scope["type"] == "http" and scope["path"].endswith("/"):
            scope = {**scope, "path": scope["path"].rstrip("/") or "/"}
        await self._app(scope, receive, send_head if is_head else send)
