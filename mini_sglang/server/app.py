"""create_app: an engine, a tokenizer and settings become an ASGI application. Everything it needs is handed in."""

from __future__ import annotations

import secrets

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import HTMLResponse, JSONResponse

import mini_sglang
from mini_sglang.config import ServerConfig
from mini_sglang.server import native_routes, openai_routes
from mini_sglang.server.context import ServerContext, ServingEngine, context_of
from mini_sglang.server.errors import ApiError, install_error_handlers
from mini_sglang.server.protocol import ROUTE_BODIES
from mini_sglang.server.request_body import describe_bodies
from mini_sglang.tokenizer import Tokenizer

docs_router = APIRouter(include_in_schema=False)


def create_app(engine: ServingEngine, tokenizer: Tokenizer, config: ServerConfig) -> FastAPI:
    """The server around `engine`. The app does not own the engine: who made it closes it."""
    # The framework's own routes for the API's description would be outside the API key.
    app = FastAPI(title="mini_sglang", version=mini_sglang.__version__, openapi_url=None)
    app.state.context = ServerContext(engine, tokenizer, config)
    install_error_handlers(app)
    app.include_router(native_routes.open_router)
    for router in (native_routes.router, openai_routes.router, docs_router):
        app.include_router(router, dependencies=[Depends(_require_api_key)])
    make_document = app.openapi
    app.openapi = lambda: describe_bodies(make_document(), ROUTE_BODIES)  # type: ignore[method-assign]
    return app


@docs_router.get("/openapi.json")
async def openapi(request: Request) -> JSONResponse:
    """The API's description."""
    return JSONResponse(request.app.openapi())


@docs_router.get("/docs")
async def docs(request: Request) -> HTMLResponse:
    """The API's description, to read in a browser."""
    return get_swagger_ui_html(openapi_url="openapi.json", title=request.app.title)


async def _require_api_key(request: Request) -> None:
    """Refuse a request without the server's key, if the server has one, before its body is read."""
    api_key = context_of(request).config.api_key
    if api_key is None:
        return
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not secrets.compare_digest(given.strip().encode(), api_key.encode()):
        message = "this server needs an API key: send the header Authorization: Bearer KEY"
        raise ApiError(401, message, code="invalid_api_key")
