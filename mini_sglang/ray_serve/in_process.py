"""One HTTP request as plain data, and an ASGI app that answers it in this process, without a socket.

The answer is the app's own messages, so streams pass through part by part. Knows no Ray, no engine and no route.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Receive, Scope

logger = logging.getLogger(__name__)

LEAVE_S = 2.0  # for which an app may take leave of a client that has gone


@dataclass(frozen=True, kw_only=True)
class HttpRequest:
    """A request whose body has arrived. It can be pickled."""

    method: str
    path: str
    query: bytes
    headers: tuple[tuple[bytes, bytes], ...]  # names in lower case
    client: tuple[str, int] | None
    body: bytes

    def scope(self) -> Scope:
        """What ASGI calls it."""
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": self.method,
            "scheme": "http",
            "path": self.path,
            "raw_path": self.path.encode(),
            "root_path": "",
            "query_string": self.query,
            "headers": list(self.headers),
            "client": self.client,
            "server": None,
        }


async def read_request(scope: Scope, receive: Receive, max_body_bytes: int) -> HttpRequest | None:
    """The request that a server is getting; None if the client leaves. Of too large a body only more than the limit."""
    body = bytearray()
    more = True
    while more and len(body) <= max_body_bytes:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        body += message.get("body", b"")
        more = message.get("more_body", False)
    client = scope.get("client")
    return HttpRequest(
        method=scope["method"],
        path=scope["path"],
        query=bytes(scope["query_string"]),
        headers=tuple((bytes(name), bytes(value)) for name, value in scope["headers"]),
        client=None if client is None else (client[0], client[1]),
        body=bytes(body),
    )


async def answer(app: ASGIApp, request: HttpRequest) -> AsyncGenerator[list[Message], None]:
    """Yield what the app sends, all that there is at a time. To close the generator is the client's leaving."""
    messages: list[Message] = []
    arrived = asyncio.Event()
    gone = asyncio.Event()
    unread = [{"type": "http.request", "body": request.body, "more_body": False}]

    async def receive() -> Message:
        if unread:
            return unread.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        messages.append(message)
        arrived.set()

    async def run() -> None:
        try:
            await app(request.scope(), receive, send)
        except Exception:  # the app has answered with a 500, and leaves it to the server to log why
            logger.exception("%s %s failed", request.method, request.path)
        finally:
            arrived.set()

    task = asyncio.create_task(run())
    try:
        while not task.done() or messages:
            await arrived.wait()
            arrived.clear()
            if messages:
                batch = messages.copy()
                messages.clear()
                yield batch
            else:
                await asyncio.sleep(0)  # the task is about to be done
                arrived.set()
    finally:
        gone.set()
        await asyncio.wait((task,), timeout=LEAVE_S)
        task.cancel()
