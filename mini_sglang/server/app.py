"""Makes the ASGI application of a server: routers, error handlers, middleware and the check of API keys."""

from __future__ import annotations

import hmac
from typing import TYPE_CHECKING, Annotated

from fastapi import FastAPI, Request, Security
from fastapi.responses import JSONResponse
from fastapi.security import APIKeyHeader, HTTPAuthorizationCredentials, HTTPBearer
from starlette.middleware.cors import CORSMiddleware

import mini_sglang
from mini_sglang.server import pages
from mini_sglang.server.anthropic import routes as anthropic_routes
from mini_sglang.server.config import ServerConfig
from mini_sglang.server.context import ServerContext, ServingEngine, context_of
from mini_sglang.server.errors import ApiError, install_error_handlers
from mini_sglang.server.intake import PacingMiddleware, PlainRequests
from mini_sglang.server.native import probes
from mini_sglang.server.native import routes as native_routes
from mini_sglang.server.openai import routes as openai_routes
from mini_sglang.server.openapi import describe
from mini_sglang.server.request_log import RequestLog
from mini_sglang.server.responses import routes as responses_routes
from mini_sglang.server.sglang import routes as sglang_routes
from mini_sglang.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from mini_sglang.server.tracing import Tracing


def create_app(engine: ServingEngine, tokenizer: Tokenizer, config: ServerConfig) -> FastAPI:
    """Make the server around `engine`, which the caller has started and will close."""
    # The framework's own routes for the API's description would be outside the API key, and load scripts from abroad.
    app = FastAPI(title="mini_sglang", version=mini_sglang.__version__, openapi_url=None, redirect_slashes=False)
    context = app.state.context = ServerContext(engine, tokenizer, config, _tracing(config))
    install_error_handlers(app)
    guards = [Security(_require_api_key)] if config.api_key else []
    for routes in (openai_routes, responses_routes, anthropic_routes, sglang_routes, native_routes):
        app.include_router(routes.router, dependencies=guards)
    app.add_api_route("/openapi.json", _openapi, dependencies=guards, include_in_schema=False)
    for router in (probes.router, pages.router):
        app.include_router(router)
    app.mount(pages.FILES_ROUTE, pages.files)
    describe(app)
    if config.cors_origin:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.cors_origin,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            allow_private_network=True,  # a page from the internet may call a server at home or at work
            expose_headers=("x-request-id", "retry-after"),
        )
    app.add_middleware(PlainRequests)
    count = context.metrics.count_answer
    app.add_middleware(RequestLog, access=config.access_log, contents=config.log_contents, count=count)
    app.add_middleware(PacingMiddleware, pacer=context.pacer)
    return app


def _tracing(config: ServerConfig) -> Tracing | None:
    if config.otlp_traces_endpoint is None:
        return None
    from mini_sglang.server.tracing import Tracing  # whose packages are optional

    return Tracing(config.otlp_traces_endpoint)


async def _openapi(request: Request) -> JSONResponse:
    """The API's description."""
    return JSONResponse(request.app.openapi())


async def _require_api_key(
    request: Request,
    bearer: Annotated[HTTPAuthorizationCredentials | None, Security(HTTPBearer(auto_error=False))],
    header: Annotated[str | None, Security(APIKeyHeader(name="x-api-key", auto_error=False))],  # Anthropic's clients
) -> None:
    """Refuse a request without one of the server's keys, before its body is read. The key says who the client is."""
    # some clients fill in both, one of them with a placeholder
    values = [(bearer.credentials if bearer is not None else "").strip(), (header or "").strip()]
    given = [value.encode("latin-1") for value in values]
    # every key is compared, and in constant time, so that the time taken tells nothing about them
    fits = [
        sum(hmac.compare_digest(value, key.encode()) for value in given) > 0
        for key in context_of(request).config.api_key
    ]
    if not any(fits):
        message = "this server needs an API key: send the header Authorization: Bearer KEY"
        raise ApiError(401, message, code="invalid_api_key")
    request.state.client = str(fits.index(True))
