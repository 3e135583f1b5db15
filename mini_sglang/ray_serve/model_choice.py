"""Which of several models a request asks for: by its body's field `model`, or by its path under /v1/models.

Knows requests as data, and neither Ray nor what the models are.
"""

from __future__ import annotations

import msgspec

from mini_sglang.ray_serve.combined import MODELS
from mini_sglang.ray_serve.in_process import HttpRequest


class _Body(msgspec.Struct):
    """All that matters here of the body of a request; the rest is passed over."""

    model: str | None = None


def model_asked_for(request: HttpRequest) -> str | None:
    """A model's name; None if the request names none, or is not such that one can be told."""
    if request.path.startswith(f"{MODELS}/"):
        return request.path.removeprefix(f"{MODELS}/")
    if request.method != "POST":
        return None
    try:
        return msgspec.json.decode(request.body, type=_Body).model
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):  # which a replica will tell the client
        return None
