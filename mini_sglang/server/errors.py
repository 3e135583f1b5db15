"""The one JSON shape of every failure of a request: {"error": {"message", "type", "param", "code"}}.

Handlers turn the framework's own errors (no such route, wrong method) into the same shape. Knows no route and no engine
beyond the errors that it raises.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

import msgspec
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException

from mini_sglang.errors import FieldError, shorten
from mini_sglang.ipc.async_engine import EngineDeadError
from mini_sglang.server.request_log import current_request_id

logger = logging.getLogger(__name__)

MAX_MESSAGE_LENGTH = 1000  # an answer must not repeat a megabyte that a client sent
_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
_HEADERS = {
    401: {"www-authenticate": "Bearer"},
    413: {"connection": "close"},
    429: {"retry-after": "1"},  # seconds
    503: {"retry-after": "1"},
}


class ApiError(Exception):
    """A request that cannot be answered. `param` names the field at fault, `code` is a word for programs.

    `headers` are of the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message if len(message) <= MAX_MESSAGE_LENGTH else f"{message[:MAX_MESSAGE_LENGTH]}…"
        self.param = param
        self.code = code
        self.headers = {**_HEADERS.get(status, {}), **(headers or {})}

    def body(self) -> dict[str, dict[str, str | None]]:
        """The JSON answer."""
        default = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = _TYPES.get(self.status, default)
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


class ClientDisconnected(Exception):
    """The client closed the connection and waits for no answer."""


def invalid(
    error: FieldError, field_names: Mapping[str, str] | None = None, code: str | None = "invalid_value"
) -> ApiError:
    """The 400 for a field at fault. `field_names`: the client's names of fields that the engine calls otherwise."""
    error = error.renamed(field_names or {})
    return ApiError(400, str(error), param=error.field, code=code)


def no_such_model(name: str, served: Iterable[str]) -> ApiError:
    """The 404 for a model's name that is none of those served."""
    message = f"model {shorten(name)} does not exist; this server serves {', '.join(map(repr, served))}"
    return ApiError(404, message, param="model", code="model_not_found")


def as_api_error(error: Exception) -> ApiError:
    """The error that answers an exception. One that was not foreseen is logged and becomes a 500."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, FieldError):
        return invalid(error)
    if isinstance(error, HTTPException):
        return ApiError(error.status_code, str(error.detail), headers=error.headers)
    if isinstance(error, EngineDeadError):
        return ApiError(503, str(error), code="engine_dead")
    logger.error("a request failed", exc_info=error)
    return _internal(error)


def _internal(error: Exception) -> ApiError:
    return ApiError(500, f"internal error: {type(error).__name__}")


def error_response(error: ApiError, body: object = None) -> Response:
    """The HTTP answer to an error; `body` replaces the error's own."""
    return Response(
        msgspec.json.encode(error.body() if body is None else body),
        status_code=error.status,
        media_type="application/json",
        headers=error.headers,
    )


def install_error_handlers(app: FastAPI) -> None:
    """Answer every exception of every route in that shape."""

    async def answer(request: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException) and error.status_code in (404, 405):
            problem = "has no route" if error.status_code == 404 else f"does not allow {request.method} on"
            message = f"this server {problem} {shorten(request.url.path)}"
            allowed = (error.headers or {}).get("Allow", "GET") if error.status_code == 405 else ""
            allow = {"allow": f"{allowed}, HEAD" if allowed == "GET" else allowed} if allowed else None
            error = ApiError(error.status_code, message, headers=allow)
        return error_response(as_api_error(error))

    async def unforeseen(request: Request, error: Exception) -> Response:
        response = error_response(_internal(error))  # the error is raised again, and logged by the HTTP server
        response.headers["x-request-id"] = current_request_id()  # middleware does not see this answer
        return response

    async def disconnected(request: Request, error: Exception) -> Response:
        return Response(status_code=499)  # for the log: the client does not read it

    for kind in (ApiError, FieldError, HTTPException, EngineDeadError):
        app.add_exception_handler(kind, answer)
    app.add_exception_handler(ClientDisconnected, disconnected)
    app.add_exception_handler(Exception, unforeseen)
