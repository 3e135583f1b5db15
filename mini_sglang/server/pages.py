"""Serves the pages for people: the playground at / and the API's description at /docs. The pages load nothing from
elsewhere and call the API as any client does; they hold no secret, so they need no key.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response
from starlette.staticfiles import StaticFiles

FILES_ROUTE = "/playground"
_HEADERS = {
    # whatever a model writes into the page, it loads, calls and shows nothing but this server
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "cache-control": "no-cache",  # browsers fetch the pages of an upgraded server again
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


class _Files(StaticFiles):
    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        response = super().file_response(*args, **kwargs)
        response.headers.update(_HEADERS)
        return response


files = _Files(directory=Path(__file__).parent / "playground")
router = APIRouter(include_in_schema=False)


@router.get("/")
async def playground(request: Request) -> Response:
    """A chat with the model."""
    return await files.get_response("index.html", request.scope)


@router.get("/docs")
async def docs(request: Request) -> Response:
    """The API's description, to read in a browser."""
    return await files.get_response("docs.html", request.scope)
