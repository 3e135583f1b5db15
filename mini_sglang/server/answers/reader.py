"""Reads an answer while it streams: what of its text is thought, what is said, and which tools are called.

Works on text alone: however the text is cut up, the deltas join to the same answer. How a model writes is data
(text/notations.py), and this one machine reads all of it. It never raises on what a model writes: what only looks like
a call (broken JSON, a function that was not offered) stays text. Knows no model and no HTTP.
"""

from __future__ import annotations

import functools
import secrets
import string
import uuid
from collections.abc import Callable, Iterable, Mapping

import msgspec
import regex

from mini_sglang.sampling_params import Json
from mini_sglang.server.answers.arguments import Arguments, JsonArguments, arguments_of, is_object
from mini_sglang.server.answers.deltas import CallArguments, CallOpening, Content, Delta, Reasoning
from mini_sglang.text.detokenizer import partial_match
from mini_sglang.text.notation import Notation, Thoughts

HEAD_LIMIT = 512  # characters from a call's beginning to its arguments, and from there to their first value
# An object of which the first value has begun, or that has none.
_OBJECT_BEGINS = regex.compile(r'\{\s*+(?:\}|"(?:[^"\\]|\\.)*+"\s*+:\s*+["\d\-\[{tfn])')


class AnswerReader:
    """Takes the text of one answer and gives its deltas.

    With `eager`, the arguments of a call are given out as they are written, and a call that breaks off stays
    unfinished; with `careful` too, not before the first of them has begun. Without, a call is given out whole, and one
    that breaks off is text. White space around thoughts and calls belongs to neither. Held back are an incomplete
    mark, and white space before what may be one.
    """

    def __init__(
        self,
        thoughts: Thoughts | None,
        calls: Notation | None,
        tools: Mapping[str, Json | None],
        *,
        prompt_end: str = "",
        eager: bool = False,
        careful: bool = False,
        max_calls: int | None = None,
    ) -> None:
        """`tools`: the functions that may be called, with the schemas of their arguments. `prompt_end`: the mark that
        the prompt ends with, if it does, so that answers go on from there. Calls beyond `max_calls` are dropped."""
        self.num_calls = 0
        self.reasoning_spans: list[tuple[int, int]] = []  # characters of the text, from and to, marks included
        self._thoughts = thoughts
        self._calls = calls
        self._tools = tools
        self._eager = eager
        self._careful = careful
        self._max_calls = max_calls
        self._marks = _marks_of(thoughts, calls)
        self._deltas: list[Delta] = []
        self._held = prompt_end  # undecided text
        self._num_given = len(prompt_end)  # characters at the beginning of `_held` that are the prompt's
        self._num_read = 0  # characters of the text before `_held`
        self._scanned = 0  # characters of `_held` in which no mark begins
        self._step: Callable[[bool], bool] = self._at_start
        self._has_text = False
        self._needs_break = False  # calls leave a gap between two texts
        self._began_thought = False
        self._thought_start = 0
        self._needs_gap = False  # between two thoughts
        self._inner: _Inner | None = None  # what may be calls in a thought
        # of the call that is being read
        self._name: str | None = None
        self._call_id = ""
        self._arguments: Arguments = JsonArguments()
        self._json = ""
        self._head_end = 0  # index in `_held`
        self._fed = 0
        self._is_dropped = False
        self._is_announced = False  # a call is open, and whether its arguments come is not certain
        self._used_ids: set[str] = set()

    @property
    def in_reasoning(self) -> bool:
        """Whether the text so far ends within a thought."""
        return self._step == self._in_thought

    @property
    def reasoning_characters(self) -> int:
        """The number of characters of thoughts so far, marks included."""
        return sum(end - start for start, end in self.reasoning_spans)

    def push(self, text: str, *, final: bool = False) -> list[Delta]:
        """The deltas that `text` makes certain; with `final`, all that are left."""
        self._held += text
        self._deltas = []
        while self._step(final):
            pass
        if final and self._held:
            self._give_text(len(self._held))
        return self._deltas

    # -- text ---------------------------------------------------------------------------------------------------------

    def _at_start(self, final: bool) -> bool:
        """Only white space so far: thoughts come here, or there are none."""
        thoughts = self._thoughts
        if thoughts is None or not thoughts.opening or thoughts.anywhere:
            self._step = self._at_text
            return True
        start = len(self._held) - len(self._held.lstrip())
        match = thoughts.open.match(self._held, start, partial=not final)
        if match is not None and not match.partial:
            return self._open_thought(match.end())
        if match is None or final:
            self._step = self._at_text
        return self._step == self._at_text

    def _at_text(self, final: bool) -> bool:
        """Where text begins: a notation without marks writes its calls here, or not at all."""
        if self._calls is None or not self._calls.leading:
            self._step = self._in_text
            return True
        start = len(self._held) - len(self._held.lstrip())
        match = self._calls.first.match(self._held, start, partial=not final)
        if match is not None and match.partial and len(self._held) - start < HEAD_LIMIT:
            return False
        if match is not None and not match.partial and self._may_call(match):
            return self._begin_call(match)
        self._step = self._in_text
        return True

    def _in_text(self, final: bool) -> bool:
        while (found := self._marks.starts.search(self._held, self._scanned)) is not None:
            index = found.start()
            mark = self._marks.at(self._held, index, final, self._may_call)
            if mark is None:
                self._scanned = self._announce(index) + 1
                continue
            kind, match = mark
            is_dropped = kind == "dropped" and not match.partial  # white space before those is text
            space = 0 if is_dropped else index - len(self._held[:index].rstrip())
            self._give_text(index - space)
            self._scanned = space  # where the mark is now
            if match.partial:  # it may become one
                if kind == "call":
                    self._announce(space)
                return False
            end = space + len(match.group())
            if kind == "call":
                return self._begin_call(match, end)
            if kind == "thought":
                return self._open_thought(end)
            self._take(end)
            self._end_message()
            if kind == "muted":
                self._step = self._in_muted
                return True
        self._give_text(len(self._held if final or not self._marks.hold_space else self._held.rstrip()))
        self._scanned = len(self._held)
        return False

    def _in_muted(self, final: bool) -> bool:
        """In a message that goes to no one here."""
        if (end := self._find(self._marks.muted_ends)) is not None:
            self._take(end[0] + len(end[1]))
            self._step = self._in_text
            return True
        self._take(len(self._held) - self._num_undecided(self._marks.muted_ends, final))
        return False

    def _find(self, marks: Iterable[str]) -> tuple[int, str] | None:
        """The first of these marks in what is held, and its index."""
        return min(((self._held.find(mark), mark) for mark in marks if mark in self._held), default=None)

    def _num_undecided(self, marks: Iterable[str], final: bool) -> int:
        """How many characters at the end of what is held may become one of these marks."""
        return 0 if final else max((partial_match(self._held, mark) for mark in marks), default=0)

    def _give_text(self, end: int) -> None:
        text = self._take(end)
        if text:
            self._is_announced = False
        if self._needs_break:
            text = text.lstrip()
        if text:
            separator = "\n" if self._needs_break and self._has_text else ""
            self._deltas.append(Content(separator + text))
            self._has_text, self._needs_break = True, False

    def _end_message(self) -> None:
        """Where an answer is several messages, a gap stands between the texts of two."""
        if self._has_text and self._thoughts is not None and self._thoughts.anywhere:
            self._needs_break = True

    def _take(self, end: int) -> str:
        """Cut what is held, up to `end`; returns it without what is the prompt's."""
        own, self._held = self._held[self._num_given : end], self._held[end:]
        self._num_read += max(0, end - self._num_given)
        self._num_given = max(0, self._num_given - end)
        self._scanned = 0
        return own

    # -- thoughts -----------------------------------------------------------------------------------------------------

    def _open_thought(self, end: int) -> bool:
        self._end_message()
        self._thought_start = self._num_read
        self._take(end)
        self._note_thought(self._num_read)
        self._needs_gap, self._began_thought = self._began_thought, False
        self._step = self._in_thought
        return True

    def _in_thought(self, final: bool) -> bool:
        if (closing := self._find(self._marks.closings)) is not None:
            self._inner = None
            self._give_thought(closing[0], final=True)
            self._take(len(closing[1]))
            self._note_thought(self._num_read)
            self._step = self._after_thought
            return True
        if self._inner is None and not self._find_calls(final):
            half = self._num_undecided(self._marks.closings, final)
            self._give_thought(min(len(self._held) - half, self._scanned), final=final)
            return False
        return self._inner is not None and self._in_inner(self._inner, final)

    def _find_calls(self, final: bool) -> bool:
        """Look for the beginning of calls within a thought, in what is held. Returns whether there is one; otherwise
        `_scanned` is where one may come to be."""
        if self._calls is not None and not self._calls.leading:
            while (found := self._marks.call_starts.search(self._held, self._scanned)) is not None:
                self._scanned = index = found.start()
                match = self._calls.first.match(self._held, index, partial=not final)
                if match is not None and match.partial and len(self._held) - index < HEAD_LIMIT:
                    return False
                if match is not None and not match.partial and self._may_call(match):
                    self._give_thought(index, final=False)
                    reader = AnswerReader(self._thoughts, self._calls, self._tools, max_calls=self._max_calls)
                    reader._step, reader._has_text = reader._in_text, self._has_text
                    reader.num_calls, reader._used_ids = self.num_calls, set(self._used_ids)
                    self._inner = _Inner(reader, len(self._held) - len(self._held.lstrip()))
                    return True
                self._scanned = index + 1
        self._scanned = len(self._held)
        return False

    def _in_inner(self, inner: _Inner, final: bool) -> bool:
        """Calls within a thought are part of it, unless it is never closed."""
        verdict = inner.read(self._held, final)
        if verdict is None:
            self._note_thought(self._num_read + len(self._held) - self._num_given)
            return False
        self._inner = None
        if verdict:
            self._give_thought(inner.start, final=True)
            self._take(len(self._held))
            self._deltas += inner.deltas
            self.num_calls = inner.reader.num_calls
            self._step = self._in_text
        self._scanned = inner.start + 1
        return True

    def _give_thought(self, end: int, *, final: bool) -> None:
        """Give out thought up to `end`, less white space at its end, which is held or, with `final`, dropped."""
        text = self._held[self._num_given : end]
        shown = text.rstrip()
        self._take(end if final else self._num_given + len(shown))
        if not self._began_thought:
            shown = shown.lstrip()
        if shown:
            gap = "\n" if self._needs_gap else ""
            self._deltas.append(Reasoning(gap + shown))
            self._began_thought, self._needs_gap = True, False
        self._note_thought(self._num_read + len(self._held) if self._step == self._in_thought else self._num_read)

    def _note_thought(self, end: int) -> None:
        """Count the thought that is being read up to `end` of the text."""
        if self.reasoning_spans and self.reasoning_spans[-1][0] == self._thought_start:
            self.reasoning_spans.pop()
        if end > self._thought_start:
            self.reasoning_spans.append((self._thought_start, end))

    def _after_thought(self, final: bool) -> bool:
        """The thought is over and the text has not begun."""
        self._take(len(self._held) - len(self._held.lstrip()))
        if self._held:
            self._step = self._at_text
        return bool(self._held)

    # -- calls --------------------------------------------------------------------------------------------------------

    def _may_call(self, match: regex.Match[str]) -> bool:
        name = match.groupdict().get("name")
        return name is None or name in self._tools

    def _begin_call(self, match: regex.Match[str], end: int | None = None) -> bool:
        """A call begins: `match` is its head, up to its arguments, which begin at `end` of what is held."""
        groups = match.groupdict()
        self._name = groups.get("name")
        self._call_id = self._written_id(groups)
        self._head_end = self._fed = match.end() if end is None else end
        self._json = ""
        if self._calls is None:
            raise RuntimeError("a call without a notation")
        is_whole = self._name is None
        self._arguments = JsonArguments() if is_whole else arguments_of(self._calls, self._tools[self._name or ""])
        self._step = self._before_arguments if self._eager else self._in_call
        return True

    def _written_id(self, groups: Mapping[str, str | None]) -> str:
        if self._calls is None or not self._calls.call_id:
            return ""
        written = self._calls.call_id
        for slot, text in groups.items():
            written = written.replace("{" + slot + "}", text or "")
        return "" if written in self._used_ids else written

    def _in_call(self, final: bool) -> bool:
        """In a call of which nothing has been given out."""
        arguments = self._arguments
        self._json += arguments.push(self._held[self._fed :])
        self._fed = len(self._held)
        if arguments.is_broken:
            return self._is_no_call(len(self._held) - len(arguments.unread))
        if arguments.rest is None:
            return False
        end = len(self._held) - len(arguments.rest)
        call = (self._name, self._json) if self._name is not None else self._read_object(self._json)
        if call is None or call[0] not in self._tools or not is_object(call[1]):
            return self._is_no_call(end)
        self._open_call(call[0] or "")
        self._give_arguments(call[1])
        self._take(end)
        self._step = self._after_arguments
        return True

    def _read_object(self, text: str) -> tuple[str, str] | None:
        """Name and arguments of a call that is an object; None if it is no call."""
        keys = self._calls.keys if self._calls is not None else None
        try:
            call = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
            if keys is None:
                return next(((name, bytes(raw).decode()) for name, raw in call.items()), None)
            name = msgspec.json.decode(call[keys[0]], type=str)
            raw = next((call[key] for key in (keys[1], "arguments", "parameters") if key in call), b"{}")
            arguments = bytes(raw).decode()
            if arguments.startswith('"'):  # some models write the arguments as the JSON text that clients get
                arguments = msgspec.json.decode(arguments, type=str)
        except (msgspec.DecodeError, KeyError, RecursionError):
            return None
        return name, arguments

    def _before_arguments(self, final: bool) -> bool:
        """In a call whose arguments will be given out as they come, before those."""
        name, start = self._name, self._head_end
        if name is None:
            pattern = _object_head(self._calls.keys if self._calls is not None else None)
            match = pattern.match(self._held, start, partial=not final)
            if match is not None and match.partial and len(self._held) - start < HEAD_LIMIT:
                return False
            if match is None or match.partial or match["name"] not in self._tools:
                self._step = self._in_call
                return True
            name, start = match["name"], match.end()
        if self._careful and isinstance(self._arguments, JsonArguments):
            begun = _OBJECT_BEGINS.match(self._held, start, partial=not final)
            if begun is not None and begun.partial and len(self._held) - start < HEAD_LIMIT:
                return False
            if begun is None or begun.partial:
                self._step = self._in_call
                return True
        self._open_call(name)
        self._take(start)
        self._step = self._in_arguments
        return True

    def _in_arguments(self, final: bool) -> bool:
        """In arguments that are given out as they come."""
        arguments = self._arguments
        json_text = arguments.push(self._take(len(self._held)))
        self._give_arguments(json_text)
        if arguments.is_broken:
            self._put_back(arguments.unread)
            self._step = self._in_text
            return bool(self._held)
        if arguments.rest is None:
            return False
        self._put_back(arguments.rest)
        if self._name is None:
            self._arguments = JsonArguments(depth=1)
            self._step = self._after_object
        else:
            self._step = self._after_arguments
        return True

    def _put_back(self, text: str) -> None:
        self._held = text + self._held
        self._num_read -= len(text)

    def _after_object(self, final: bool) -> bool:
        """After arguments that were given out as they came: the end of the object around them."""
        self._arguments.push(self._take(len(self._held)))
        if self._arguments.is_broken:
            self._put_back(self._arguments.unread)
        elif self._arguments.rest is not None:
            self._put_back(self._arguments.rest)
        else:
            return False
        self._step = self._after_arguments
        return True

    def _after_arguments(self, final: bool) -> bool:
        """After the arguments: what closes the call."""
        return self._skip(self._marks.tail, final, self._between_calls)

    def _between_calls(self, final: bool) -> bool:
        """After a call: another one, the end of all of them, or text."""
        if self._calls is None:
            raise RuntimeError("a call without a notation")
        match = self._calls.next.match(self._held, partial=not final)
        if match is not None and not match.partial and self._may_call(match):
            return self._begin_call(match)
        if match is not None and match.partial and len(self._held) < HEAD_LIMIT:
            return False
        return self._skip(self._marks.end, final, self._in_text)

    def _skip(self, parts: Iterable[str], final: bool, then: Callable[[bool], bool]) -> bool:
        """Take these marks, of which any may be missing, and go on with `then`."""
        rest = self._held.lstrip()
        for part in parts:
            if rest.startswith(part):
                rest = rest[len(part) :].lstrip()
            elif not final and part.startswith(rest):
                return False
        self._take(len(self._held) - len(rest))
        self._step = then
        return True

    def _is_no_call(self, end: int) -> bool:
        """Up to `end`, the text only looked like the beginning of a call."""
        self._give_text(end)
        self._step = self._in_text
        return True

    def _announce(self, index: int) -> int:
        """Open the call at `index` of what is held if all but its arguments is there, whether or not those will come.
        Returns the index, which moves where text before the call has been given out."""
        named = self._calls.named if self._calls is not None and self._eager and not self._careful else None
        match = named.match(self._held, index) if named is not None and not self._is_announced else None
        if match is None or match["name"] not in self._tools:
            return index
        space = index - len(self._held[:index].rstrip())
        self._give_text(index - space)
        self._call_id = self._written_id(match.groupdict())
        self._open_call(match["name"])
        self._is_announced = True
        return space

    def _open_call(self, name: str) -> None:
        if self._is_announced:
            self._is_announced = False
            return
        self._needs_break = True
        self._is_dropped = self.num_calls == self._max_calls
        if not self._is_dropped:
            call_id = self._call_id or make_call_id(nine_letters=self._calls is not None and self._calls.nine_letters)
            self._used_ids.add(call_id)
            self._deltas.append(CallOpening(self.num_calls, call_id, name))
            self.num_calls += 1

    def _give_arguments(self, text: str) -> None:
        if text and not self._is_dropped:
            self._deltas.append(CallArguments(self.num_calls - 1, text))


def make_call_id(*, nine_letters: bool = False) -> str:
    """An id like OpenAI's; or such as Mistral's templates demand: nine letters and digits."""
    if nine_letters:
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
    return f"call_{uuid.uuid4().hex[:24]}"


class _Inner:
    """Reads what may be calls in a thought: whether the answer ends with them cannot be known before it ends."""

    def __init__(self, reader: AnswerReader, start: int) -> None:
        self.reader = reader
        self.start = start  # of the calls in the text that is held
        self.deltas: list[Delta] = []
        self._num_read = start

    def read(self, held: str, final: bool) -> bool | None:
        """Whether the answer has gone on with calls, without closing the thought; None if that is open."""
        self.deltas += self.reader.push(held[self._num_read :], final=final)
        self._num_read = len(held)
        first = next((delta for delta in self.deltas if isinstance(delta, CallOpening | Content)), None)
        if final or isinstance(first, Content):
            return isinstance(first, CallOpening)
        return None


class _Marks:
    """The marks that are looked for in the text of one model's answers."""

    def __init__(self, thoughts: Thoughts | None, calls: Notation | None) -> None:
        self._ways: list[tuple[str, regex.Pattern[str]]] = []
        starts: set[str] = set()
        if calls is not None and not calls.leading:
            self._ways.append(("call", calls.first))
            starts |= calls.starts
        if thoughts is not None:
            self._ways += thoughts.ways
            starts |= thoughts.starts
        self.hold_space = any(kind != "dropped" for kind, _ in self._ways)
        self.starts = _any_of(starts)
        self.call_starts = _any_of(calls.starts if calls is not None else frozenset())
        self.tail, self.end = (calls.tail_parts, calls.end_parts) if calls is not None else ((), ())
        self.closings, self.muted_ends = (thoughts.closings, thoughts.muted_ends) if thoughts is not None else ((), ())

    def at(
        self, held: str, index: int, final: bool, may_call: Callable[[regex.Match[str]], bool]
    ) -> tuple[str, regex.Match[str]] | None:
        """The mark at `index` and its kind; a partial match if there may be one when more has come."""
        for kind, pattern in self._ways:
            match = pattern.match(held, index, partial=not final)
            if match is None or (match.partial and kind == "call" and len(held) - index >= HEAD_LIMIT):
                continue
            if match.partial:
                return kind, match
            if kind != "call" or may_call(match):
                return kind, match
        return None


@functools.lru_cache(16)  # every answer of a model has the same
def _marks_of(thoughts: Thoughts | None, calls: Notation | None) -> _Marks:
    return _Marks(thoughts, calls)


def _any_of(characters: Iterable[str]) -> regex.Pattern[str]:
    escaped = "".join(map(regex.escape, sorted(characters)))
    return regex.compile(f"[{escaped}]" if escaped else r"(?!)")


@functools.cache
def _object_head(keys: tuple[str, str] | None) -> regex.Pattern[str]:
    """The beginning of an object that is a call, up to its arguments."""
    if keys is None:
        return regex.compile(r'\{\s*"(?P<name>[^"\\]+)"\s*:\s*(?=\{)')
    other = r'"\w++"\s*:\s*(?:"[^"\\]*"|\d++)\s*,\s*'
    arguments = "|".join(dict.fromkeys((keys[1], "arguments", "parameters")))
    name = rf'"{keys[0]}"\s*:\s*"(?P<name>[^"\\]+)"\s*,\s*'
    return regex.compile(rf'\{{\s*(?:(?!"{keys[0]}"){other})*{name}(?:{other})*"(?:{arguments})"\s*:\s*(?=\{{)')
