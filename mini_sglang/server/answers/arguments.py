"""Turns the arguments of a call, as a model writes them, into JSON text while they come.

There is a class for each slot that stands for arguments in a notation (text/notations.py). Each takes text in parts,
however it is cut up, and says where the arguments end, or that they are broken. Knows schemas, no models.
"""

from __future__ import annotations

import json
import re
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import msgspec
import regex

from mini_sglang.sampling_params import Json
from mini_sglang.text.detokenizer import partial_match
from mini_sglang.text.json_types import ANY_TYPE, json_value, literal, quoted, types_of
from mini_sglang.text.notation import Notation


class Arguments:
    """The arguments of one call."""

    def __init__(self) -> None:
        self._text = ""  # not yet turned into JSON
        self.is_broken = False
        self.rest: str | None = None  # what came after the arguments, once they have ended

    def push(self, text: str) -> str:
        """More of what the model wrote; returns more of the JSON text. After an end or a break, push nothing more."""
        self._text += text
        return self._read()

    @property
    def unread(self) -> str:
        """What was pushed and is part of no JSON text yet."""
        return self._text

    @abstractmethod
    def _read(self) -> str: ...

    def _end(self, after: int) -> None:
        self.rest, self._text = self._text[after:], ""


class JsonArguments(Arguments):
    """{arguments} and {object}: JSON, found by its brackets. Looks only at brackets and strings.

    A "<" outside strings breaks it: the model has gone on to what follows.
    """

    _OUTSIDE_STRINGS = re.compile(r'["{}\[\]<]')
    _INSIDE_STRINGS = re.compile(r'["\\]')

    def __init__(self, depth: int = 0) -> None:
        super().__init__()
        self._depth = depth
        self._in_string = False
        self._escaped = False

    def _read(self) -> str:
        text, start = self._text, 0
        if self._escaped and text:
            start, self._escaped = 1, False
        while found := (self._INSIDE_STRINGS if self._in_string else self._OUTSIDE_STRINGS).search(text, start):
            start = found.end()
            match found.group():
                case '"':
                    self._in_string = not self._in_string
                case "\\":
                    self._escaped = start == len(text)
                    start += 1
                case "<":
                    self.is_broken = True
                    self._text = text[found.start() :]
                    return text[: found.start()]
                case "{" | "[":
                    self._depth += 1
                case _:
                    self._depth -= 1
                    if self._depth == 0:
                        self._end(start)
                        return text[:start]
        self._text = ""
        return text


class _NamedArguments(Arguments):
    """Arguments of which each has its name before it."""

    def __init__(self) -> None:
        super().__init__()
        self._num_read = 0
        self._in_value = False

    def _read(self) -> str:
        json_text = ""
        while self.rest is None and not self.is_broken:
            more = self._read_value() if self._in_value else self._read_key()
            if more is None:
                break
            json_text += more
        return json_text

    @abstractmethod
    def _read_key(self) -> str | None:
        """The next name, or the end of the arguments; None if more must come, or they are broken."""

    @abstractmethod
    def _read_value(self) -> str | None:
        """The value that has begun, or more of it; None if more must come, or it is broken."""

    def _begun(self, key: str) -> str:
        """The JSON text of a name, of which the value comes next."""
        self._in_value = True
        self._num_read += 1
        return f"{', ' if self._num_read > 1 else '{'}{quoted(key)}: "

    def _ended(self) -> str:
        """The JSON text of the end, which is where the text that is left begins."""
        self._end(0)
        return "}" if self._num_read else "{}"


class TaggedArguments(_NamedArguments):
    """{parameters}: a name and a value each, in tags. A value that is text is given out as it comes."""

    def __init__(self, notation: Notation, schema: Mapping[str, Any]) -> None:
        super().__init__()
        self._notation = notation
        self._schema = schema
        self._properties = schema.get("properties") or {}
        self._key = ""
        self._has_begun = False
        self._closing = ""  # of the value that has begun
        self._trimmed = False  # a newline before the closing belongs to it
        self._types = ANY_TYPE
        self._is_text = False  # the value is given out as it comes
        self._is_cdata = False

    def _read_key(self) -> str | None:
        space = len(self._text) - len(self._text.lstrip())
        if space == len(self._text):
            return None
        match = self._notation.parameter_head.match(self._text, space, partial=True)
        if match is None:
            return self._ended()
        if match.partial:
            return None
        self._begin_value(match)
        self._text = self._text[match.end() :]
        return self._begun(self._key) + ('"' if self._is_text else "")

    def _begin_value(self, match: regex.Match[str]) -> None:
        key, groups = match["key"].strip(), match.groupdict()
        self._key = key
        self._closing, self._trimmed = self._notation.parameter_closing(key)
        self._types = types_of(self._properties.get(key), self._schema)
        said = groups.get("string") or groups.get("type")
        if said in ("true", "string"):
            self._types = frozenset(("string",))
        elif said is not None:
            self._types = (self._types - {"string"}) or ANY_TYPE - {"string"}
        self._is_cdata = self._notation.has_cdata
        self._is_text = self._types == {"string"} and not self._is_cdata
        self._has_begun = False

    def _read_value(self) -> str | None:
        text = self._text
        if not self._has_begun and self._trimmed:  # so does one after the opening
            if not text:
                return None
            self._text = text = text.removeprefix("\n")
        self._has_begun = True
        end = self._find_closing(text)
        if end is None and self._is_text:
            shown = text[: len(text) - _may_begin(text, self._closing, self._trimmed)]
            self._text = text[len(shown) :]
            return quoted(shown)[1:-1] or None
        if end is None:
            return None
        value = text[:end]
        if self._trimmed:
            value = value.removesuffix("\n")
        self._text = text[end + len(self._closing) :]
        self._in_value = False
        if self._is_text:
            return quoted(value)[1:-1] + '"'
        if self._is_cdata and value.startswith("<![CDATA["):
            return quoted(value.removeprefix("<![CDATA[").removesuffix("]]>"))
        return self._nested(value) or json_value(value, self._types)

    def _find_closing(self, text: str) -> int | None:
        start = 0
        if self._is_cdata and text.startswith("<![CDATA["):
            start = text.find("]]>")
            if start < 0:
                return None
        if self._notation.nesting and not self._is_text:
            end = _find_balanced(text, start, self._closing)
        else:
            end = text.find(self._closing, start)
        return None if end < 0 else end

    def _nested(self, value: str) -> str:
        """The JSON text of a value whose parts are tagged in turn; empty if they are not."""
        nesting = self._notation.nesting
        if not nesting or "string" in self._types or not value.lstrip().startswith(nesting):
            return ""
        nested = _read_nested(value, self._notation, self._properties.get(self._key), self._schema)
        return "" if nested is None else json.dumps(nested, ensure_ascii=False)


class KeywordArguments(_NamedArguments):
    """{keywords}: Python's keyword arguments, up to the bracket that closes the call. Values may be JSON as well."""

    _KEY = regex.compile(r"\s*(?P<key>\w++)\s*=\s*")
    _MARKS = re.compile(r"[\"'\[\](){},]")

    def _read_key(self) -> str | None:
        bare = self._text.lstrip(" \n\t,") if self._num_read else self._text.lstrip()
        if bare.startswith(")"):
            self._text = bare
            return self._ended()
        match = self._KEY.match(bare, partial=True)
        if match is None:
            self.is_broken = True
            return None
        if match.partial or match.end() == len(bare):
            return None
        self._text = bare[match.end() :]
        return self._begun(match["key"])

    def _read_value(self) -> str | None:
        end = self._find_end()
        if end is None:
            return None
        value = literal(self._text[:end])
        if value is None:
            self.is_broken = True
            return None
        self._text, self._in_value = self._text[end:], False
        return value

    def _find_end(self) -> int | None:
        """The index of the comma or bracket after the value that the text begins with."""
        depth, start, text = 0, 0, self._text
        while found := self._MARKS.search(text, start):
            mark, start = found.group(), found.end()
            if mark in "\"'":
                close = regex.compile(rf"(?:[^\\{mark}]|\\.)*+{mark}", regex.DOTALL).match(text, start)
                if close is None:
                    return None
                start = close.end()
            elif mark in "[({":
                depth += 1
            elif depth:
                depth -= mark != ","
            else:
                return found.start()
        return None


class DictArguments(Arguments):
    """{dict}: Gemma's object. Keys are bare, and text stands between <|"|>."""

    _QUOTE = '<|"|>'
    _BARE = regex.compile(r"\s*(?P<bare>[^{}\[\],:<]*)(?=[{}\[\],:<])")

    def __init__(self) -> None:
        super().__init__()
        self._in_text = False
        self._closers = ["}"]
        self._begun = False

    def _read(self) -> str:
        json_text = "" if self._begun else "{"
        self._begun = True
        while self._text and self.rest is None and not self.is_broken:
            more = self._read_text() if self._in_text else self._read_mark()
            if more is None:
                break
            json_text += more
        return json_text

    def _read_text(self) -> str | None:
        text, quote, after = self._text.partition(self._QUOTE)
        if quote:
            self._text, self._in_text = after, False
            return quoted(text)[1:-1] + '"'
        shown = text[: len(text) - _may_begin(text, self._QUOTE, False)]
        self._text = text[len(shown) :]
        return quoted(shown)[1:-1] or None

    def _read_mark(self) -> str | None:
        match = self._BARE.match(self._text)
        if match is None:
            return None
        bare, mark = match["bare"].strip(), self._text[match.end()]
        if mark == "<":
            rest = self._text[match.end() :]
            if rest.startswith(self._QUOTE) and not bare:
                self._text, self._in_text = rest[len(self._QUOTE) :], True
                return '"'
            if self._QUOTE.startswith(rest):
                return None
            self.is_broken = True
            return None
        scalar = quoted(bare) if mark == ":" else json_value(bare, ANY_TYPE) if bare else ""
        self._text = self._text[match.end() + 1 :]
        if mark in "{[":
            self._closers.append("}" if mark == "{" else "]")
            return mark
        if mark in "}]":
            if mark != self._closers.pop():
                self.is_broken = True
                return None
            if not self._closers:  # the notation has the bracket too
                self._text = mark + self._text
                self._end(0)
        return scalar + {":": ": ", ",": ", "}.get(mark, mark)


def arguments_of(notation: Notation, schema: Mapping[str, Any] | None) -> Arguments:
    """What reads the arguments of a call in `notation` of a function with this schema."""
    match notation.body:
        case "parameters":
            return TaggedArguments(notation, schema or {})
        case "keywords":
            return KeywordArguments()
        case "dict":
            return DictArguments()
        case _:
            return JsonArguments()


def _read_nested(text: str, notation: Notation, schema: Any, root: Mapping[str, Any]) -> Any:
    """A value whose parts are tagged: an object of them, or a list of items. None if it is broken."""
    types = types_of(schema, root)
    parts: list[tuple[str, Any]] = []
    while text := text.strip():
        match = notation.parameter_head.match(text)
        if match is None:
            return None
        key = match["key"]
        closing, _ = notation.parameter_closing(key)
        end = _find_balanced(text, match.end(), closing)
        if end < 0:
            return None
        part = _part_schema(schema, key, root)
        inner = text[match.end() : end]
        if inner.lstrip().startswith(notation.nesting):
            parts.append((key, _read_nested(inner, notation, part, root)))
        else:
            parts.append((key, json.loads(json_value(inner, types_of(part, root)))))
        text = text[end + len(closing) :]
    if "array" in types and all(key == "item" for key, _ in parts):
        return [value for _, value in parts]
    return dict(parts)


def _part_schema(schema: Any, key: str, root: Mapping[str, Any]) -> Any:
    """The schema of a part of a value: of a property, or of the items."""
    for way in [schema, *(schema.get("anyOf") or schema.get("oneOf") or ())] if isinstance(schema, Mapping) else []:
        if isinstance(way, Mapping):
            properties = way.get("properties")
            if isinstance(properties, Mapping) and key in properties:
                return properties[key]
            if key == "item" and "items" in way:
                return way["items"]
    return None


def _find_balanced(text: str, start: int, closing: str) -> int:
    """The index of the closing of a value that begins at `start`, in which the same name may stand; -1 without one."""
    opening, end = closing.replace("</", "<"), text.find(closing, start)
    while end >= 0 and text.count(opening, start, end) > text.count(closing, start, end):
        end = text.find(closing, end + 1)
    return end


def _may_begin(text: str, closing: str, newline: bool) -> int:
    """How many characters at the end of `text` may belong to a closing, with `newline` also the one before it."""
    held = partial_match(text, closing)
    return held + (newline and text[: len(text) - held].endswith("\n"))


def is_object(text: str) -> bool:
    """Whether a text is a JSON object."""
    try:
        msgspec.json.decode(text, type=Json)
    except (msgspec.DecodeError, RecursionError):
        return False
    return True
