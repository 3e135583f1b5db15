"""Server-sent events, and leaving when the client does.

An `EventStream` sends its first event together with the status, so that whatever fails before it still gets a proper
error answer; what fails later becomes one last event. Knows nothing of what the events say.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from mini_sglang.server.bodies import Json
from mini_sglang.server.errors import ApiError, ClientDisconnected, as_api_error

Result = TypeVar("Result")

DONE = b"data: [DONE]\n\n"

_encode_json = msgspec.json.Encoder().encode


def event(value: Any) -> bytes:
    """One event with a JSON value."""
    return b"data: " + _encode_json(value) + b"\n\n"


def named_event(value: Json) -> bytes:
    """One event with a JSON object, under the name that is its `type`."""
    return b"event: " + str(value["type"]).encode() + b"\n" + event(value)


def error_event(error: ApiError) -> bytes:
    """What goes wrong in the middle of a stream, in OpenAI's shape."""
    return event(error.body())


async def while_connected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Do `work`, but cancel it and raise ClientDisconnected when the client closes the connection.

    The request's body must have been read.
    """
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_until_disconnect(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnected
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)  # the engine has been told when this returns


async def _until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """A response made of the events that a generator yields; the generator is closed when the client leaves.

    `describe` makes the last event of a stream that fails.
    """

    def __init__(
        self, events: AsyncGenerator[bytes, None], describe: Callable[[ApiError], bytes] = error_event
    ) -> None:
        self.status_code = 200
        self.background = None
        self._events = events
        self._describe = describe
        self._started = False
        self.init_headers(
            {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", "x-accel-buffering": "no"}
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send everything. Raises what the generator raises before its first event."""
        try:
            await while_connected(receive, self._send_all(send))
        except ClientDisconnected:
            if not self._started:
                raise

    async def _send_all(self, send: Send) -> None:
        async with contextlib.aclosing(self._events) as events:
            first = await anext(events)
            self._started = True
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": first, "more_body": True})
            try:
                async for data in events:
                    await send({"type": "http.response.body", "body": data, "more_body": True})
            except Exception as error:  # the status has been sent: say it in the stream
                body = self._describe(as_api_error(error))
                await send({"type": "http.response.body", "body": body, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
