"""The JSON types that a schema allows, and the JSON text of values that models write as plain text.

In many notations of tool calls a value stands bare between tags, and only the schema tells a number from a text. Every
number is a "number" here, whole or not. Knows no notation.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from typing import Any

import msgspec

ANY_TYPE = frozenset(("string", "number", "boolean", "null", "array", "object"))
_STRING = re.compile(r"(\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)*')", re.DOTALL)
_WORDS = {"true": "True", "false": "False", "null": "None"}


def types_of(schema: Any, root: Mapping[str, Any], depth: int = 8) -> frozenset[str]:
    """The JSON types that a schema, which is part of `root`, allows; all of them if it does not say."""
    schema = resolved(schema, root)
    if not isinstance(schema, Mapping) or depth == 0:
        return ANY_TYPE
    said = schema.get("type")
    if said is not None:
        names = said if isinstance(said, list) else [said]
        return frozenset("number" if name == "integer" else str(name) for name in names)
    for key in ("anyOf", "oneOf"):
        if isinstance(ways := schema.get(key), list) and ways:
            return frozenset().union(*(types_of(way, root, depth - 1) for way in ways))
    values = schema.get("enum") or ([schema["const"]] if "const" in schema else [])
    if isinstance(values, list) and values:
        return frozenset(map(type_of, values))
    return ANY_TYPE


def resolved(schema: Any, root: Mapping[str, Any]) -> Any:
    """The schema itself, or the one that its `$ref` names within `root`."""
    for _ in range(8):
        if not (isinstance(schema, Mapping) and isinstance(reference := schema.get("$ref"), str)):
            break
        schema = root
        for part in reference.removeprefix("#").strip("/").split("/"):
            schema = schema.get(part) if isinstance(schema, Mapping) else None
    return schema


def type_of(value: Any) -> str:
    """The JSON type of a value."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int() | float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
        case _:
            return "object"


def json_value(text: str, types: frozenset[str]) -> str:
    """The JSON text of a value that is written as JSON, as a literal of Python, or, if it may be text, as it is."""
    if types == {"string"}:
        return quoted(text)
    stripped, with_text = text.strip(), "string" in types
    try:
        if type_of(msgspec.json.decode(stripped)) in types - {"string"} or not with_text:
            return stripped
    except (msgspec.DecodeError, RecursionError):
        if not with_text and (value := literal(stripped)) is not None:
            return value
    return quoted(text)


def literal(text: str) -> str | None:
    """The JSON text of a literal of Python in which JSON's words may stand too; None if it is none."""
    parts = _STRING.split(text.strip())
    for index in range(0, len(parts), 2):
        parts[index] = re.sub(r"\b(?:true|false|null)\b", lambda word: _WORDS[word.group()], parts[index])
    try:
        value = ast.literal_eval("".join(parts))
        written = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None
    return written


def quoted(text: str) -> str:
    """A text as JSON."""
    return json.dumps(text, ensure_ascii=False)
