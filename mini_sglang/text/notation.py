"""How a family of models writes tool calls and thoughts, as values: text/notations.py has one for each family.

A notation is spelled as the model writes it, with slots in braces. The prompt of a model whose template knows no tools,
the grammar of forced calls (grammar/calls.py), the reader of answers (server/answers/reader.py) and the table in
docs/api.md are all made from it. Knows no tokenizer and no schema.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import regex

from mini_sglang.text.json_types import type_of

Json = dict[str, Any]
# What stands for the arguments of a call.
BODIES = ("object", "arguments", "parameters", "keywords", "dict")
_SLOT = regex.compile(r"\{(name|id|index|number|key|value|cdata|type|string|" + "|".join(BODIES) + r")\}")
_SLOT_PATTERNS = {
    "name": r"(?P<name>[\w.\-]++)",
    "id": r"(?P<id>[\w.:\-]*+)",
    "index": r"(?P<index>\d++)",
    "number": r"(?P<number>\d++)",
    "key": r"(?P<key>[^<>\"'\n{}=/]++)",
    "type": r"(?P<type>\w*+)",
    "string": r"(?P<string>\w*+)",
}


@dataclass(frozen=True)
class Notation:
    """How calls are written: `begin`, then `call` for each with `separator` between them, then `end`.

    Slots of `call`: {name}, {id}, {index} (from 0), {number} (from 1), and one for the arguments:
    {object}, which is {"name": …, "arguments": {…}} with the keys that `keys` says, or {"NAME": {…}} without any;
    {arguments}, a JSON object; {parameters}, where each is written as `parameter` says, with {key}, {value} (text as
    it is, or JSON), {type} or {string} (its type in words, or whether it is text); {keywords}, Python's keyword
    arguments; {dict}, Gemma's: bare keys, and text between <|"|>.

    White space may differ from what is written here, and `begin`, `end` and what comes after a body may be missing.
    """

    names: tuple[str, ...]  # of --tool-call-parser, as vLLM and SGLang call it
    call: str
    begin: str = ""
    end: str = ""
    separator: str = ""
    parameter: str = ""
    keys: tuple[str, str] | None = ("name", "arguments")
    call_id: str = ""  # the id of a call as the model writes it, a text with slots; empty: it writes none ahead
    also: tuple[str, ...] = ()  # other ways to begin a call, as regular expressions up to the body
    leading: bool = False  # an answer that has calls begins with one: nothing marks them among text
    nine_letters: bool = False  # ids have nine letters and digits
    marks: tuple[str, ...] = ()  # special tokens of it, besides those in brackets in the texts above
    shown: tuple[str, ...] = ()  # texts in a template that shows this notation in words only
    families: str = ""  # which models write so, for the documentation

    @functools.cached_property
    def body(self) -> str:
        """The slot that stands for the arguments."""
        return next(slot for slot in BODIES if "{" + slot + "}" in self.call)

    @functools.cached_property
    def head(self) -> str:
        """What a call begins with, up to its arguments."""
        return self.call.partition("{" + self.body + "}")[0]

    @functools.cached_property
    def tail(self) -> str:
        """What a call ends with, after its arguments."""
        return self.call.partition("{" + self.body + "}")[2]

    @functools.cached_property
    def starts(self) -> frozenset[str]:
        """The characters with which calls may begin."""
        return frozenset(map(_first_character, (_lenient(self.begin) + self._head, self._head, *self.also)))

    @functools.cached_property
    def first(self) -> regex.Pattern[str]:
        """The beginning of calls, up to the arguments of the first."""
        ways = [_lenient(self.begin) + r"\s*" + self._head, *self.also]
        if self.begin and _solid(_SLOT.split(self.head)[0]):
            ways.insert(1, self._head)  # without what should have come before the first
        return regex.compile("|".join(f"(?:{way})" for way in ways))

    @functools.cached_property
    def named(self) -> regex.Pattern[str] | None:
        """The beginning of calls up to the name, where that stands in JSON and more comes before the arguments."""
        before, _, after = self.head.partition("{name}")
        if not after.startswith('", "'):
            return None
        return regex.compile(rf"(?:{_lenient(self.begin)}\s*)?{_lenient(before + '{name}')}\"\s*,")

    @functools.cached_property
    def next(self) -> regex.Pattern[str]:
        """From the end of a call to the arguments of the one after it."""
        ways = [rf"(?:{_lenient(self.separator)}\s*)?{self._head}", *self.also]
        return regex.compile(r"\s*(?:" + "|".join(f"(?:{way})" for way in ways) + ")")

    @property
    def _head(self) -> str:
        return _lenient(self.head) + r"\s*" + self._body_begins

    @property
    def _body_begins(self) -> str:
        """What follows must be arguments, at least by their beginning: names in prose are no calls."""
        match self.body:
            case "object" | "arguments":
                return r"(?=\{)"
            case "parameters":
                begins = (_SLOT.split(self.parameter)[0], _SLOT.split(self.tail)[0])
                return "(?=" + "|".join(regex.escape(_solid(text)[0]) for text in begins) + ")"
            case _:
                return ""

    @functools.cached_property
    def parameter_head(self) -> regex.Pattern[str]:
        """What comes before a value of {parameters}."""
        return regex.compile(_lenient(self.parameter_parts[0].rstrip()))

    def parameter_closing(self, key: str) -> tuple[str, bool]:
        """What comes after the value of `key`, and whether a newline before it belongs to it."""
        after = self.parameter_parts[1]
        return after.strip().replace("{key}", key), after.startswith("\n")

    @staticmethod
    def slots(text: str) -> list[str]:
        """A text with slots in parts: by turns a text and the name of the slot after it."""
        return _SLOT.split(text)

    @functools.cached_property
    def parameter_parts(self) -> tuple[str, str]:
        """What stands before and after a value of {parameters}."""
        before, _, after = self.parameter.partition("{cdata}" if self.has_cdata else "{value}")
        return before, after

    @functools.cached_property
    def tail_parts(self) -> tuple[str, ...]:
        """The marks after the arguments of a call."""
        return tuple(_solid(self.tail))

    @functools.cached_property
    def end_parts(self) -> tuple[str, ...]:
        """The marks after the last call."""
        return tuple(_solid(self.end))

    @property
    def has_cdata(self) -> bool:
        """Whether values may stand in <![CDATA[…]]>."""
        return "{cdata}" in self.parameter

    @property
    def nesting(self) -> str:
        """What the tags within a value begin with, where values are tagged in turn; otherwise empty."""
        before, _, after = self.parameter.partition("{key}")
        return before if "{key}" in after else ""

    @functools.cached_property
    def markers(self) -> tuple[str, ...]:
        """Texts that some tokenizers take for special tokens, which answers leave out unless they are asked for."""
        parts = (self.begin, self.head, self.tail, self.end, self.separator, self.parameter)
        return tuple(dict.fromkeys([*(text for part in parts for text in _marks(part)), *self.marks]))

    def write(self, calls: Sequence[Json]) -> str:
        """Calls as the model writes them, each with `name` and `arguments`, maybe `id`."""
        written = (self._write(call, index) for index, call in enumerate(calls))
        return f"{self.begin}{self.separator.join(written)}{self.end}"

    def _write(self, call: Json, index: int) -> str:
        name, arguments, call_id = call["name"], call["arguments"], str(call.get("id") or "")
        filled = {
            "name": name,
            "id": call_id,
            "index": str(index),
            "number": str(index + 1),
            "arguments": _json(arguments),
            "object": _json({name: arguments} if self.keys is None else {self.keys[0]: name, self.keys[1]: arguments}),
            "parameters": "".join(self._parameter(key, value) for key, value in _items(arguments)),
            "keywords": ", ".join(f"{key}={_json(value)}" for key, value in _items(arguments)),
            "dict": ",".join(f"{key}:{_gemma(value)}" for key, value in _items(arguments)),
        }
        return _SLOT.sub(lambda slot: filled[slot[1]], self.call)

    def _parameter(self, key: str, value: Any) -> str:
        text = value if isinstance(value, str) else _json(value)
        if self.nesting and isinstance(value, (dict, list)):
            parts = value.items() if isinstance(value, dict) else (("item", item) for item in value)
            text = "".join(self._parameter(name, part) for name, part in parts)
        filled = {
            "key": key,
            "value": text,
            "cdata": text,
            "type": type_of(value),
            "string": "true" if isinstance(value, str) else "false",
        }
        return _SLOT.sub(lambda slot: filled[slot[1]], self.parameter)


@dataclass(frozen=True)
class Thoughts:
    """How a model tells its thoughts from its answer, and what other marks it puts around the parts of an answer."""

    names: tuple[str, ...]  # of --reasoning-parser
    opening: str
    closings: tuple[str, ...]  # the first of them is the one that is written
    anywhere: bool = False  # there may be several; otherwise they come first, if at all
    forced: str = ""  # what the prompt ends with where the model has to begin with thoughts, if not with `opening`
    dropped: tuple[str, ...] = ()  # regular expressions of marks that are neither thought nor text
    muted: str = ""  # a regular expression of what a message begins with that goes to no one here
    muted_ends: tuple[str, ...] = ()  # and what it ends with
    marks: tuple[str, ...] = ()  # special tokens in those patterns
    shown: tuple[str, ...] = ()  # texts in a template that shows it
    families: str = ""

    @functools.cached_property
    def open(self) -> regex.Pattern[str]:
        return regex.compile(_lenient(self.opening))

    @functools.cached_property
    def ways(self) -> tuple[tuple[str, regex.Pattern[str]], ...]:
        """What is looked for in text, in order: a kind and a pattern each."""
        ways = [("thought", self.open.pattern)] if self.anywhere else []
        ways += [("dropped", way) for way in self.dropped]
        ways += [("muted", self.muted)] if self.muted else []
        return tuple((kind, regex.compile(way)) for kind, way in ways)

    @property
    def starts(self) -> frozenset[str]:
        """The characters with which those may begin."""
        return frozenset(_first_character(way.pattern) for _, way in self.ways)

    def prompt_end(self, prompt: str) -> str:
        """The mark that a prompt ends with, from which the answer goes on; empty if there is none."""
        marks = filter(None, (self.opening.strip(), self.forced))
        return next((mark for mark in marks if prompt.rstrip().endswith(mark)), "")

    def is_open_in(self, text: str) -> bool:
        """Whether `text`, the beginning of an answer, leaves a thought open."""
        return bool(self.opening) and text.rfind(self.opening) > max(map(text.rfind, self.closings))

    @functools.cached_property
    def markers(self) -> tuple[str, ...]:
        """Texts that some tokenizers take for special tokens, which answers leave out unless they are asked for."""
        parts = [text for text in (self.opening.strip(), *self.closings) if text]
        return tuple(dict.fromkeys([*parts, *(mark for text in parts for mark in _marks(text)), *self.marks]))


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _items(arguments: Any) -> Iterator[tuple[str, Any]]:
    yield from arguments.items() if isinstance(arguments, Mapping) else ()


def _gemma(value: Any) -> str:
    match value:
        case str():
            return f'<|"|>{value}<|"|>'
        case list():
            return f"[{','.join(map(_gemma, value))}]"
        case dict():
            return "{" + ",".join(f"{key}:{_gemma(item)}" for key, item in value.items()) + "}"
        case _:
            return _json(value)


def _solid(text: str) -> list[str]:
    """The parts of a literal text between which white space may stand."""
    return [part for part in regex.split(r"\s+|(?<=\])(?=\[)|(?<=>)(?=[^>\[])", text) if part]


def _lenient(pattern: str) -> str:
    """A regular expression of a text with slots, with any white space, or none, where the text has some."""
    parts = _SLOT.split(pattern)
    seen: set[str] = set()
    written = []
    for index, part in enumerate(parts):
        if index % 2:
            slot = _SLOT_PATTERNS[part]
            written.append(slot if part not in seen else slot.replace(f"?P<{part}>", "?:"))
            seen.add(part)
        elif part:
            before, after = part[:1].isspace(), part[-1:].isspace()
            solid = r"\s*".join(map(regex.escape, _solid(part)))
            joined = (r"\s*" if before else "") + solid + (r"\s*" if after and solid else "")
            written.append(joined)
    return "".join(written)


def _first_character(pattern: str) -> str:
    return regex.sub(r"^(?:\(\?[:=]|\\s\*|\(\?P<\w+>|\\)*", "", pattern)[:1]


def _marks(text: str) -> list[str]:
    return regex.findall(r"<[^<>\s={}]+>|\[[A-Z_/]+\]|\]<\]\w+\[>\[", text)
