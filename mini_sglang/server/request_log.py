"""A request's id and its line in the log.

The id comes from the client's X-Request-Id, or is made here; it is in the answer's X-Request-Id and in every line that
is logged while the request runs. Bodies and answers are logged only if an option asks for it. Knows no route, and
delays no stream.
"""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING
from urllib.parse import quote

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

logger = logging.getLogger(__name__)

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s%(request)s: %(message)s"  # for handlers with a RequestIdFilter

_ID = re.compile(r"[!-~]{1,128}")  # visible ASCII: cannot break a line or a header
# Asked every few seconds: logged for debugging only, and no part of what is counted.
_PROBES = ("/health", "/ready", "/health_generate", "/get_load", "/v1/loads", "/metrics")
_current_id: ContextVar[str] = ContextVar("request_id", default="")


def current_request_id() -> str:
    """The id of the request that the calling code answers; empty if it answers none."""
    return _current_id.get()


def request_id_of(scope: Scope) -> str:
    """The id that the client gave this request, or a new one."""
    headers: Mapping[bytes, bytes] = dict(scope["headers"])  # names are in lower case
    given = headers.get(b"x-request-id", b"").decode("latin-1")
    return given if _ID.fullmatch(given) else uuid.uuid4().hex


class RequestIdFilter(logging.Filter):
    """Gives each record, for LOG_FORMAT, the id of the request it was logged for."""

    def filter(self, record: logging.LogRecord) -> bool:
        request_id = current_request_id()
        record.request = f" [{request_id}]" if request_id else ""
        return True


class RequestLog:
    """ASGI middleware. With `access` it logs a line for each request when it has been answered: client, method, path,
    status, seconds. With `contents` it also logs each part of the bodies, both ways.

    `count` is told of each answer, but for those to probes: method, route, status and seconds.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        count: Callable[[str, str, int, float], None],
        access: bool = True,
        contents: bool = False,
    ) -> None:
        self._app = app
        self._count = count
        self._access = access
        self._contents = contents

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = request_id_of(scope)
        _current_id.set(request_id)
        status = 500  # what an exception becomes
        start = time.perf_counter()
        scope.setdefault("state", {})["arrived"] = start

        async def receive_and_log() -> Message:
            message = await receive()
            if message.get("body"):
                logger.info("received %r", message["body"])
            return message

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
                message = {**message, "headers": headers}
            elif self._contents and message.get("body"):
                logger.info("sent %r", message["body"])
            await send(message)

        try:
            await self._app(scope, receive_and_log if self._contents else receive, send_with_id)
        finally:
            seconds = time.perf_counter() - start
            route: str = getattr(scope.get("route"), "path", "none")
            if route not in _PROBES:
                self._count(scope["method"], route, status, seconds)
            if self._access:
                self._log(scope, status, seconds)

    def _log(self, scope: Scope, status: int, seconds: float) -> None:
        host, port = scope.get("client") or ("-", 0)
        path = quote(scope["path"])[:200]  # nothing that a client sends may break the line
        level = logging.DEBUG if path in _PROBES else logging.INFO
        logger.log(level, "%s:%d %s %s %d %.3f s", host, port, scope["method"], path, status, seconds)
