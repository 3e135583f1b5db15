"""Bounds how many requests begin in one turn of the event loop, so that many at once delay no stream. Does not look at
the requests.
"""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Receive, Scope, Send

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
