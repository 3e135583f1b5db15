"""Reads and checks a request's JSON body: size while it arrives, strict JSON, known fields, right types.

Whatever is wrong becomes an ApiError that names the field. Knows the bodies' models only as pydantic models.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import msgspec
from fastapi import Request
from pydantic import BaseModel, ValidationError
from pydantic.json_schema import models_json_schema

from mini_sglang.server.errors import ApiError, invalid

Body = TypeVar("Body", bound=BaseModel)

_SCHEMA_REF = "#/components/schemas/{model}"


def takes(model: type[BaseModel]) -> dict[str, Any]:
    """`openapi_extra` of a route that reads its body with `read_body`."""
    schema = {"$ref": _SCHEMA_REF.format(model=model.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def describe_bodies(openapi: dict[str, Any], models: Sequence[type[BaseModel]]) -> dict[str, Any]:
    """An OpenAPI document with the schemas that `takes` refers to."""
    _, schemas = models_json_schema([(model, "validation") for model in models], ref_template=_SCHEMA_REF)
    return {**openapi, "components": {"schemas": schemas["$defs"]}}


async def read_body(request: Request, model: type[Body], max_bytes: int) -> Body:
    """The request's body as `model`. Raises ApiError 400, 413 or 415."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        # A browser may send other types across sites without asking; only JSON is safe to act on.
        raise ApiError(415, f"content-type must be application/json, got {media_type!r}", param="content-type")
    return parse_body(await _read_bytes(request, max_bytes), model)


def parse_body(data: bytes, model: type[Body]) -> Body:
    """Decode and check a JSON body. Raises ApiError 400."""
    value = _decode(data)
    if not isinstance(value, dict):
        raise ApiError(400, f"the body must be a JSON object, got {_shorten(value)}", code="invalid_json")
    for name in value:
        if name not in model.model_fields:
            raise ApiError(400, f"{name} is not supported by this route", param=name, code="unsupported_parameter")
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise _describe(error) from None


async def _read_bytes(request: Request, max_bytes: int) -> bytes:
    """The raw body, refused as soon as it is known to be too long."""
    declared = request.headers.get("content-length", "0")
    if declared.isdigit() and int(declared) > max_bytes:
        raise ApiError(413, f"the body may hold at most {max_bytes} bytes, got {declared}", code="body_too_large")
    chunks = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > max_bytes:
            raise ApiError(413, f"the body may hold at most {max_bytes} bytes, got more", code="body_too_large")
        chunks.append(chunk)
    return b"".join(chunks)


def _decode(data: bytes) -> Any:
    try:
        return msgspec.json.decode(data)
    except RecursionError:
        raise ApiError(400, "the body is not acceptable JSON: nested too deeply", code="invalid_json") from None
    except (ValueError, UnicodeDecodeError) as error:
        raise _explain(data, str(error)) from None


def _explain(data: bytes, reason: str) -> ApiError:
    """Why strict JSON refused a body. Python's lax parser reads most of those, and so can tell the field."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return ApiError(400, f"the body is not valid JSON: {reason}", code="invalid_json")
    for path, leaf in _leaves(value):
        problem = None
        if isinstance(leaf, float) and not math.isfinite(leaf):
            problem = f"must be a finite number, got {leaf}"
        elif isinstance(leaf, str) and not _is_unicode(leaf):
            problem = "holds half of a surrogate pair, which is not a Unicode character"
        if problem:
            name = path.partition(".")[0]
            return ApiError(400, f"{path or 'the body'} {problem}", param=name or None, code="invalid_json")
    return ApiError(400, f"the body is not valid JSON: {reason}", code="invalid_json")


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every key, string, number and constant of a JSON value, with the dotted path to it."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield path, key
            yield from _leaves(item, f"{path}.{key}" if path else key)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _leaves(item, f"{path}.{index}" if path else str(index))
    else:
        yield path, value


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _describe(error: ValidationError) -> ApiError:
    """The first thing that a model found wrong, as one sentence that starts with the field's name."""
    first = error.errors(include_url=False, include_context=False)[0]
    path = ".".join(str(part) for part in first["loc"])
    message = first["msg"].removeprefix("Value error, ")
    if not path:  # a rule about several fields: its message starts with the name of one
        return invalid(ValueError(message))
    if first["type"] == "missing":
        text = f"{path} is required"
    elif first["type"] == "extra_forbidden":
        text = f"{path} is not supported"
    elif first["type"] == "value_error":
        text = f"{path} {message}"
    else:
        text = f"{path}: {message[0].lower()}{message[1:]}, got {_shorten(first['input'])}"
    return ApiError(400, text, param=str(first["loc"][0]), code="invalid_value")


def _shorten(value: Any, length: int = 80) -> str:
    """A value for an error message, cut to a readable length."""
    if isinstance(value, (dict, list)):
        return "an object" if isinstance(value, dict) else "a list"
    text = repr(value)
    return text if len(text) <= length else f"{text[:length]}…"
