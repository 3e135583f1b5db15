"""Finds tool calls in an answer's text while it streams, in the notations that models were trained to write.

Works on text alone: however the text is cut up, the deltas join to the same answer. A notation is a declaration
(`CallNotation`); one parser reads them all. What only looks like a call (broken JSON, arguments that are not an object,
a function that was not offered) stays text. Knows no model and no schema.
"""

from __future__ import annotations

import re
import secrets
import string
import uuid
from collections.abc import Callable, Collection
from dataclasses import dataclass

import msgspec

from mini_sglang.sampling_params import Json
from mini_sglang.server.answers.deltas import CallArguments, CallOpening, Content, Delta
from mini_sglang.text import call_syntax
from mini_sglang.text.call_syntax import CallSyntax
from mini_sglang.text.detokenizer import partial_match

HEAD_LIMIT = 256  # characters from a call's opening to its JSON, and from there to arguments that stream


def make_call_id() -> str:
    """An id like OpenAI's."""
    return f"call_{uuid.uuid4().hex[:24]}"


def make_mistral_call_id() -> str:
    """An id such as Mistral's templates demand: nine letters and digits."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


@dataclass(frozen=True)
class CallNotation:
    """How a model writes calls, and what to look for: an opening, a head, a JSON object, a closing."""

    syntax: CallSyntax  # as the model is made to write
    opening: str | None  # None: an answer that has calls begins with one
    head: re.Pattern[str]  # up to the object, which is the whole call or, if there is a group `name`, its arguments
    longest_head: str  # whatever may become a head becomes one when an end of this is added
    closings: tuple[str, ...]  # what may follow an object and belongs to it
    joints: tuple[str, ...] = ()  # the closings that another object may follow, with no opening before it
    markers: tuple[str, ...] = ()  # what some tokenizers take for special tokens, which texts leave out
    make_id: Callable[[], str] = make_call_id


HERMES = CallNotation(
    syntax=call_syntax.HERMES,
    opening="<tool_call>",
    head=re.compile(r"\s*(?=\{)"),
    longest_head="{",
    closings=("</tool_call>",),
    markers=("<tool_call>", "</tool_call>"),
)
LLAMA3 = CallNotation(
    syntax=call_syntax.LLAMA3,
    opening=None,
    head=re.compile(r"\s*(?:<\|python_tag\|>\s*)?(?=\{)"),
    longest_head="<|python_tag|>{",
    closings=(";", ","),
    joints=(";", ","),
)
# [TOOL_CALLS][{"name": …, "arguments": {…}}, …], or from 2025 on [TOOL_CALLS]name[ARGS]{…} for each call
MISTRAL = CallNotation(
    syntax=call_syntax.MISTRAL,
    opening="[TOOL_CALLS]",
    head=re.compile(r"\s*(?:(?:\[\s*)?|(?P<name>[\w-]+)(?:\[CALL_ID\]\w*)?(?:\[ARGS\])?\s*)(?=\{)"),
    longest_head="f[CALL_ID]0[ARGS]{",
    closings=(",", "]"),
    joints=(",",),
    markers=("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
    make_id=make_mistral_call_id,
)
# The names of `--tool-call-parser`; several are other servers' words for the same.
TOOL_CALL_PARSERS = {"hermes": HERMES, "qwen": HERMES, "llama3_json": LLAMA3, "llama3": LLAMA3, "mistral": MISTRAL}


class ToolCallParser:
    """Takes the text of one answer and gives `Content`, `CallOpening` and `CallArguments` deltas.

    A call is given out when its JSON is complete and was found to be a call. With `eager`, for text that a grammar
    keeps in the notation, arguments are given out as they come. White space around calls belongs to neither. The parser
    holds back an incomplete call, text that may begin one, and white space before a possible call.
    """

    def __init__(
        self, notation: CallNotation, names: Collection[str], *, max_calls: int | None = None, eager: bool = False
    ) -> None:
        """`names`: the functions that may be called. Calls beyond `max_calls` are dropped."""
        self.num_calls = 0
        self._notation = notation
        self._names = frozenset(names)
        self._max_calls = max_calls
        self._eager = eager
        self._deltas: list[Delta] = []
        self._held = ""  # undecided text; within a call, all of it from its opening on
        self._start = 0  # where in `_held` the call's head begins, later its object
        self._name: str | None = None  # of the function, where it stands before the object
        self._object = _JsonObject()
        self._num_read = 0  # how much of `_held` the object has seen
        self._has_text = False
        self._after_call = False  # nothing but white space since the last call
        self._is_dropped = False  # the call that is being read
        self._step: Callable[[bool], bool] = self._in_head if notation.opening is None else self._in_text

    def push(self, text: str, *, final: bool = False) -> list[Delta]:
        """The deltas that `text` makes certain; with `final`, all that are left."""
        self._held += text
        while self._held and self._step(final):
            pass
        if final:
            self._give_text(len(self._held))
        deltas, self._deltas = self._deltas, []
        return deltas

    # The parser is always in one of these steps. A step reads on in `_held` and returns whether another step can follow
    # at once; if not, the parser needs more text, or is done when `final`.

    def _in_text(self, final: bool) -> bool:
        """Text, up to the opening of a call."""
        opening = self._notation.opening
        if opening is None:
            self._give_text(len(self._held))
            return False
        before, found, _ = self._held.partition(opening)
        if not found:
            before = before[: len(before) - partial_match(before, opening)]
        num_visible = len(before.rstrip())
        self._give_text(num_visible)
        if found:
            self._start = len(before) - num_visible + len(opening)
            self._step = self._in_head
        return bool(found)

    def _in_head(self, final: bool) -> bool:
        """After an opening, or where a call may come without one."""
        head, ending = self._notation.head, self._notation.longest_head
        if match := head.match(self._held, self._start, self._start + HEAD_LIMIT):
            self._name = match.groupdict().get("name")
            self._start = self._num_read = match.end()
            self._object = _JsonObject()
            self._step = self._before_arguments if self._eager else self._in_object
            return True
        text = self._held[self._start : self._start + HEAD_LIMIT]
        may_match = len(text) < HEAD_LIMIT and any(head.match(text + ending[i:]) for i in range(len(ending)))
        return False if may_match and not final else self._is_no_call(self._start)

    def _in_object(self, final: bool) -> bool:
        """In an object of which nothing has been given out."""
        end = self._object.read(self._held, self._num_read)
        if end is None:
            self._num_read = len(self._held)
            return False
        call = _read_call(self._held[self._start : end], self._name)
        if call is None or call[0] not in self._names:
            return self._is_no_call(end)
        name, arguments = call
        self._open_call(name)
        self._give_arguments(arguments)
        self._held = self._held[end:]
        self._step = self._after_object
        return True

    def _before_arguments(self, final: bool) -> bool:
        """In an object whose arguments will be given out as they come, before those."""
        name, start = self._name, self._start
        if name is None:
            limit = self._start + HEAD_LIMIT
            if match := _UP_TO_ARGUMENTS.match(self._held, self._start, limit):
                name, start = match["name"], match.end()
            elif len(self._held) < limit and not final:
                return False
        if name not in self._names:
            self._step = self._in_object
            return True
        self._open_call(name)
        self._held = self._held[start:]
        self._step = self._in_arguments
        return True

    def _in_arguments(self, final: bool) -> bool:
        """In arguments that are given out as they come."""
        end = self._object.read(self._held, 0)
        self._give_arguments(self._held[:end])
        self._held = "" if end is None else self._held[end:]
        if end is not None:
            self._step = self._after_arguments if self._name is None else self._after_object
        return end is not None

    def _after_arguments(self, final: bool) -> bool:
        """After arguments that were given out as they came: the end of the object around them."""
        self._held = self._held.lstrip()
        if self._held:
            self._held = self._held.removeprefix("}")
            self._step = self._after_object
        return bool(self._held)

    def _after_object(self, final: bool) -> bool:
        """After an object: its closing, another object, or text."""
        rest = self._held.lstrip()
        for closing in self._notation.closings:
            if rest.startswith(closing):
                self._held = rest[len(closing) :]
                return self._go_on(objects=closing in self._notation.joints)
        if not final and any(closing.startswith(rest) for closing in self._notation.closings):
            return False
        return self._go_on(objects=self._notation.opening is None)

    def _go_on(self, objects: bool) -> bool:
        self._start = 0
        self._step = self._in_head if objects else self._in_text
        return True

    def _is_no_call(self, end: int) -> bool:
        """Up to `end`, the text only looked like the beginning of a call."""
        self._give_text(end)
        self._step = self._in_text
        return True

    def _give_text(self, end: int) -> None:
        text, self._held = self._held[:end], self._held[end:]
        if self._after_call:
            text = text.lstrip()
        if text:
            separator = "\n" if self._after_call and self._has_text else ""  # calls leave a gap between two texts
            self._deltas.append(Content(separator + text))
            self._has_text, self._after_call = True, False

    def _open_call(self, name: str) -> None:
        self._after_call = True
        self._is_dropped = self.num_calls == self._max_calls
        if not self._is_dropped:
            self._deltas.append(CallOpening(self.num_calls, self._notation.make_id(), name))
            self.num_calls += 1

    def _give_arguments(self, text: str) -> None:
        if text and not self._is_dropped:
            self._deltas.append(CallArguments(self.num_calls - 1, text))


# The beginning of a call whose arguments come last, up to those.
_UP_TO_ARGUMENTS = re.compile(r'\{\s*"name"\s*:\s*"(?P<name>[^"\\]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_OUTSIDE_STRINGS = re.compile(r'["{}\[\]<]')
_INSIDE_STRINGS = re.compile(r'["\\]')


class _JsonObject:
    """Finds the end of an object by its brackets, in text that comes in parts; looks only at brackets and strings.

    A "<" outside strings ends an object that is broken: the model has gone on to what follows it.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def read(self, text: str, start: int) -> int | None:
        """Read on from `start`. Returns the index after the object, or of what broke it; None if more must come."""
        if self._escaped and start < len(text):
            start += 1
            self._escaped = False
        while found := (_INSIDE_STRINGS if self._in_string else _OUTSIDE_STRINGS).search(text, start):
            start = found.end()
            match found.group():
                case '"':
                    self._in_string = not self._in_string
                case "\\":
                    self._escaped = start == len(text)
                    start += 1
                case "<":
                    return found.start()
                case "{" | "[":
                    self._depth += 1
                case _:
                    self._depth -= 1
                    if self._depth == 0:
                        return start
        return None


class _WrittenCall(msgspec.Struct):
    """The object that models write for a call; other fields in it do not count."""

    name: str
    arguments: msgspec.Raw = msgspec.Raw()
    parameters: msgspec.Raw = msgspec.Raw()  # Llama's word


def _read_call(text: str, name: str | None) -> tuple[str, str] | None:
    """Name and arguments of a call; None if `text` is no call. With a `name`, `text` holds only the arguments."""
    try:
        if name is None:
            call = msgspec.json.decode(text, type=_WrittenCall)
            name = call.name
            text = bytes(call.arguments or call.parameters or b"{}").decode()
            if text.startswith('"'):  # some models write the arguments as the JSON text that clients get
                text = msgspec.json.decode(text, type=str)
        msgspec.json.decode(text, type=Json)
    except (msgspec.DecodeError, RecursionError):
        return None
    return name, text
