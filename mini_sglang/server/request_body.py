"""Reads and checks a request's JSON body: size while it arrives, strict JSON, known fields, right types.

Every mistake becomes an ApiError that names the field. Knows the bodies' models only as pydantic models.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import itertools
import json
import math
import re
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
from fastapi import Request
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect

from mini_sglang.errors import FieldError, shorten
from mini_sglang.sampling_params import Json
from mini_sglang.server.context import context_of
from mini_sglang.server.errors import ApiError, ClientDisconnected, invalid

Body = TypeVar("Body", bound=BaseModel)
Result = TypeVar("Result")

_INLINE_BYTES = 1 << 14  # bodies up to here are checked, or turned into something else, without a thread
_SURROGATE = re.compile("[\ud800-\udfff]")
_MAX_LEAVES = 100_000  # values that are searched for the reason of a refusal
SCHEMA_REF = "#/components/schemas/{model}"


def json_body(*models: type[BaseModel], required: bool = True) -> Json:
    """`openapi_extra` of a route that reads its body as one of these models."""
    schemas = [{"$ref": SCHEMA_REF.format(model=model.__name__)} for model in models]
    schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
    return {"requestBody": {"required": required, "content": {"application/json": {"schema": schema}}}}


async def read_body(request: Request, model: type[Body]) -> Body:
    """Read the request's body as `model`. Raises ApiError 400, 413, 415, or 503 if the server stops meanwhile."""
    value = await read_object(request)
    return await work_on_body(request, lambda: check_body(value, model))


async def work_on_body(request: Request, work: Callable[[], Result], inline_bytes: int = _INLINE_BYTES) -> Result:
    """Do work that takes time in proportion to the body; on a large one in a thread, so that streams go on."""
    length = request.headers.get("content-length", "")
    is_small = length.isdigit() and int(length) <= inline_bytes and "content-encoding" not in request.headers
    return work() if is_small else await asyncio.to_thread(work)


async def read_object(request: Request) -> Json:
    """Read the request's body as a JSON object with unchecked fields. Raises what `read_body` raises."""
    context = context_of(request)
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        # A browser may send other types across sites without asking; only JSON is safe to act on.
        raise ApiError(415, f"content-type must be application/json, got {shorten(media_type)}", param="content-type")
    is_compressed = _is_compressed(request)
    async with context.unless_stopping():
        data = await _read_bytes(request, context.config.max_body_bytes)
        if is_compressed:
            data = await asyncio.to_thread(_decompress, data, context.config.max_body_bytes)
        await context.pacer.wait()  # the bodies of many requests may have come at once
    return decode_object(data)


def decode_object(data: bytes) -> Json:
    """Decode a JSON body that must be an object. Raises ApiError 400."""
    try:
        value = _decode(data.removeprefix(codecs.BOM_UTF8))
    except RecursionError:
        raise ApiError(400, "the body is not acceptable JSON: nested too deeply", code="invalid_json") from None
    except ValueError as error:
        raise _explain(data, str(error)) from None
    if not isinstance(value, dict):
        raise ApiError(400, f"the body must be a JSON object, got {shorten(value)}", code="invalid_json")
    return value


def check_body(value: Json, model: type[Body]) -> Body:
    """Turn a JSON object into `model`. Raises ApiError 400."""
    for name in value:
        if name not in model.model_fields:
            message = f"{_cut(name)} is not supported by this route"
            raise ApiError(400, message, param=_cut(name), code="unsupported_parameter")
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise _describe(error, value) from None


@contextlib.contextmanager
def client_errors(field_names: Mapping[str, str]) -> Iterator[None]:
    """Turn FieldError and ValidationError in this block into ApiError 400, with the client's names of fields."""
    try:
        yield
    except ValidationError as error:  # the body was being turned into another one
        raise _describe(error, field_names=field_names) from None
    except FieldError as error:
        raise invalid(error, field_names) from None


async def _read_bytes(request: Request, max_bytes: int) -> bytes:
    """Read the raw body. Raises ApiError 413 as soon as it is known to be too long."""
    declared = request.headers.get("content-length", "0")
    if declared.isdigit() and int(declared) > max_bytes:
        raise ApiError(413, f"the body may hold at most {max_bytes} bytes, got {declared}", code="body_too_large")
    chunks = []
    size = 0
    try:
        async for chunk in request.stream():
            size += len(chunk)
            if size > max_bytes:
                raise ApiError(413, f"the body may hold at most {max_bytes} bytes, got more", code="body_too_large")
            chunks.append(chunk)
    except ClientDisconnect:
        raise ClientDisconnected from None
    return b"".join(chunks)


_BOUNDS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"})


def _decode(data: bytes) -> Any:
    """Decode strict JSON. Of the numbers beyond all floats it takes those that bound others in a schema, as 1.8e308."""
    try:
        return msgspec.json.decode(data)
    except msgspec.ValidationError:
        return msgspec.json.decode(json.dumps(_with_finite_bounds(json.loads(data)), allow_nan=False))


def _with_finite_bounds(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            key: math.copysign(sys.float_info.max, item)
            if key in _BOUNDS and isinstance(item, float) and math.isinf(item)
            else _with_finite_bounds(item)
            for key, item in value.items()
        }
    return [_with_finite_bounds(item) for item in value] if isinstance(value, list) else value


def _is_compressed(request: Request) -> bool:
    """Whether the body is gzip. Raises ApiError 415 for another coding, or for more than one."""
    given = ",".join(request.headers.getlist("content-encoding"))
    codings = [coding for item in given.split(",") if (coding := item.strip().lower()) not in ("", "identity")]
    if codings not in ([], ["gzip"], ["x-gzip"]):
        message = f"content-encoding must be gzip or identity, got {shorten(given)}"
        raise ApiError(415, message, param="content-encoding", headers={"accept-encoding": "gzip, identity"})
    return bool(codings)


def _decompress(data: bytes, max_bytes: int) -> bytes:
    """Raises ApiError 400 for what is not one gzip member, and 413 as soon as the content is known to be too long."""
    decoder = zlib.decompressobj(wbits=31)
    try:
        content = decoder.decompress(data, max_bytes + 1)
    except zlib.error as error:
        raise ApiError(400, f"the body is not valid gzip: {error}", code="invalid_encoding") from None
    if len(content) > max_bytes:
        raise ApiError(413, f"the body may hold at most {max_bytes} bytes, got more", code="body_too_large")
    if not decoder.eof or decoder.unused_data:
        problem = "more follows its end" if decoder.eof else "it ends too early"
        raise ApiError(400, f"the body is not valid gzip: {problem}", code="invalid_encoding")
    return content


def _explain(data: bytes, reason: str) -> ApiError:
    """Say why strict JSON refused a body. Python's lax parser reads most such bodies, which tells the field."""
    leaves: Iterator[tuple[str, Any]] = iter(())
    with contextlib.suppress(ValueError, RecursionError):
        leaves = _leaves(json.loads(data))
    for path, leaf in itertools.islice(leaves, _MAX_LEAVES):
        if isinstance(leaf, float) and not math.isfinite(leaf):
            problem = f"must be a finite number, got {leaf}"
        elif isinstance(leaf, str) and _SURROGATE.search(leaf):
            problem = "holds half of a surrogate pair, which is not a Unicode character"
        else:
            continue
        name = path.partition(".")[0]
        return ApiError(400, f"{_cut(path) or 'the body'} {problem}", param=_cut(name) or None, code="invalid_json")
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


def _describe(error: ValidationError, value: Any = None, field_names: Mapping[str, str] | None = None) -> ApiError:
    """The first mistake that a model found in `value`, as one sentence that starts with the path of its field."""
    first = error.errors(include_url=False)[0]
    cause = first.get("ctx", {}).get("error")
    loc = first["loc"]
    num_present = len(loc) - (first["type"] == "missing")
    path = ".".join(_cut(str(part)) for part in (*_path(loc[:num_present], value), *loc[num_present:]))
    message = first["msg"].removeprefix("Value error, ")
    if not path and isinstance(cause, FieldError):  # a rule about several fields
        return invalid(cause, field_names)
    if first["type"] == "missing":
        text = f"{path} is required"
    elif first["type"] == "extra_forbidden":
        text = f"{path} is not supported"
    elif first["type"] == "value_error":
        text = f"{path} {message}"
    elif first["type"] == "model_type":  # its message has the name of a class
        text = f"{path}: input should be an object, got {shorten(first['input'])}"
    else:
        text = f"{path}: {message[0].lower()}{message[1:]}, got {shorten(first['input'])}"
    return ApiError(400, text, param=str(loc[0]), code="invalid_value")


def _path(loc: Sequence[Any], value: Any) -> Iterator[int | str]:
    """The steps of `loc` that exist in `value`; the others are pydantic's names for the members of a union."""
    for index, step in enumerate(loc):
        following = loc[index + 1] if index + 1 < len(loc) else None
        if isinstance(value, dict) and value.get("type") == step and following in value:
            inner = value.get(step)
            if not (isinstance(inner, dict) and following in inner):
                continue  # the member of a union whose type has the name of one of its fields
        if (isinstance(value, dict) and step in value) or (isinstance(value, list) and isinstance(step, int)):
            value = value[step]
            yield step
        elif index == 0:
            yield step  # the field, in a value that is not known


def _cut(name: str, length: int = 80) -> str:
    """The name that a client gave a field, cut to a readable length."""
    return name if len(name) <= length else f"{name[:length]}…"
