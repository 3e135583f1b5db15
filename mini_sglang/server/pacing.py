"""A bounded number of requests begin, or go on, in each turn of the event loop, so that many at once hold up no stream.

Knows nothing of requests.
"""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Receive, Scope, Send

REQUESTS_PER_TURN = 4  # to begin a request takes about a millisecond


class Turnstile:
    """Whoever calls `enter` waits for a turn of the event loop in which it is one of the first `per_turn`.

    They come in the order of their calls. Costs nothing while nobody waits.
    """

    def __init__(self, per_turn: int = REQUESTS_PER_TURN) -> None:
        self._places = asyncio.Semaphore(per_turn)

    async def enter(self) -> None:
        await self._places.acquire()
        asyncio.get_running_loop().call_soon(self._places.release)


class OneByOne:
    """ASGI middleware: each request enters by the turnstile."""

    def __init__(self, app: ASGIApp, turnstile: Turnstile) -> None:
        self._app = app
        self._turnstile = turnstile

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._turnstile.enter()
        await self._app(scope, receive, send)
