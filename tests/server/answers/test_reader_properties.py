"""Whatever a model writes, in every notation, is read without an error, and alike however it is cut up.

Texts are put together from pieces of marks, calls and JSON. Of a text in which no call is found, nothing may be lost
but marks, white space around thoughts, and harmony's messages to no one here.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st

from mini_sglang.server.answers.deltas import Answer, CallArguments, CallOpening, Content, Reasoning
from mini_sglang.server.answers.reader import AnswerReader
from mini_sglang.text.notation import Notation, Thoughts
from mini_sglang.text.notations import HARMONY, HARMONY_THINK, HERMES, NOTATIONS, THINK, THOUGHTS

NUM_EXAMPLES = int(os.environ.get("READER_EXAMPLES", "40"))  # more for a long campaign
UNMARKED = "éñ🦩東ß"  # characters that are part of no mark
SCHEMA = {
    "type": "object",
    "properties": {"s": {"type": "string"}, "n": {"type": "integer"}, "o": {"type": "object"}, "l": {"type": "array"}},
}
TOOLS: dict[str, Any] = {"f": SCHEMA, "get_time": None}
CALLS: list[dict[str, Any]] = [
    {"name": "f", "id": "f:0", "arguments": {"s": "é <b>", "n": 5, "o": {"a": [1, "ñ"]}, "l": ["x"]}},
    {"name": "get_time", "id": "abcdefghi", "arguments": {}},
    {"name": "get_time", "id": "functions.get_time:0", "arguments": {"zone": 'L"\\i\n'}},
    {"name": "launch", "id": "1", "arguments": {"s": "not offered"}},
]
BITS = (
    *(" ", "\n", "<", ">", "</", "[", "]", "{", "}", "(", ")", '"', "'", "\\", ",", ":", "=", ";", "|", "5", "ff"),
    *("null", '{"name": "f", "arguments": {', '{"name": "f"}', '"parameters": {', '"s": "', '"}}', "s=", "get_time"),
    *("json", "<|", "|>", "functions.f", "assistant", "<![CDATA[", "]]>", '<|"|>', " to=", *UNMARKED),
)
# What stands for a regular expression of a mark: a text that matches it.
MESSAGES = (
    *("<|start|>assistant<|channel|>final<|message|>", "<|channel|>commentary<|message|>", "<|return|>", "<|end|>"),
    *("<|start|>assistant to=python<|channel|>commentary json<|message|>", "<|channel|>commentary to=assistant"),
)
Blocks = list[tuple[str, str, str]]


@dataclass(frozen=True)
class Case:
    """How an answer is read, and the parts that it comes in."""

    notation: Notation | None  # None where no tools are offered
    thoughts: Thoughts | None
    prompt_end: str
    eager: bool
    careful: bool
    max_calls: int | None
    parts: Sequence[str]

    @property
    def text(self) -> str:
        return "".join(self.parts)


@dataclass
class Read:
    """What a reader made of a text. White space at the edges of thoughts and texts is left out."""

    blocks: Blocks
    calls: list[tuple[str, str]]
    spans: list[tuple[int, int]]


def read(case: Case, parts: Sequence[str]) -> Read:
    reader = AnswerReader(
        case.thoughts,
        case.notation,
        TOOLS,
        prompt_end=case.prompt_end,
        eager=case.eager,
        careful=case.careful,
        max_calls=case.max_calls,
    )
    deltas = [delta for part in parts for delta in reader.push(part)] + reader.push("", final=True)
    num_calls = 0
    for delta in deltas:
        match delta:
            case CallOpening(index, call_id, name):
                assert (index, bool(call_id), name in TOOLS) == (num_calls, True, True)
                num_calls += 1
            case CallArguments(index, _):
                assert index == num_calls - 1
            case Content(text) | Reasoning(text):
                assert text
    assert num_calls == reader.num_calls
    answer = Answer.of(deltas)
    assert all(block.name for block in answer.calls)
    blocks: Blocks = [(block.kind, block.name, block.text) for block in answer.blocks]
    return Read(blocks, [(call.name, call.text) for call in answer.calls], reader.reasoning_spans)


@cache
def pieces(notation: Notation, thoughts: Thoughts | None) -> tuple[str, ...]:
    """What texts are made of: whole calls, parts of them, marks."""
    written: list[str] = [notation.write(calls) for calls in (*([call] for call in CALLS), CALLS[:2])]
    texts = [*written, *notation.markers, *MESSAGES, *BITS]
    for part in (notation.begin, notation.head, notation.tail, notation.end, notation.separator, notation.parameter):
        texts += [text for text in notation.slots(part)[::2] if text]
        texts.append(part.replace("{name}", "f").replace("{key}", "s").replace("{value}", "é").replace("{id}", "a:1"))
    if thoughts is not None:
        texts += [thoughts.opening, *thoughts.closings, *thoughts.markers, thoughts.forced] * 3
    return tuple(filter(None, texts))


def ways_to_think(notation: Notation) -> list[Thoughts | None]:
    own = [thoughts for thoughts in THOUGHTS if set(thoughts.names) & set(notation.names)]
    return [None, THINK, HARMONY_THINK, *own]


@st.composite
def cases(draw: st.DrawFn, notation: Notation) -> Case:
    thoughts = draw(st.sampled_from(ways_to_think(notation)))
    whole = st.sampled_from(pieces(notation, thoughts))
    cut = st.tuples(whole, st.integers(0, 30), st.integers(0, 30)).map(lambda each: each[0][each[1] :][: each[2]])
    letters = st.text("".join(sorted(set("".join(pieces(notation, thoughts))))), max_size=6)
    parts = draw(st.lists(st.one_of(whole, whole, cut, letters), max_size=10))
    ends = [""] if thoughts is None else ["", thoughts.opening.strip(), thoughts.forced]
    prompt_end = draw(st.sampled_from(ends))
    eager, careful = draw(st.sampled_from([(False, False), (True, False), (True, True)]))
    offered = draw(st.sampled_from([notation, notation, notation, None]))
    return Case(offered, thoughts, prompt_end, eager, careful, draw(st.sampled_from([None, 1])), parts)


def check(case: Case, cuts: Sequence[int]) -> None:
    text = case.text
    whole = read(case, [text])
    assert read(case, case.parts) == whole
    assert read(case, text) == whole
    edges = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    assert read(case, [text[start:end] for start, end in pairwise(edges)]) == whole
    check_what_was_read(case, whole)


def check_what_was_read(case: Case, whole: Read) -> None:
    text = case.text
    assert case.max_calls is None or len(whole.calls) <= case.max_calls
    edges = [edge for span in whole.spans for edge in span]
    assert edges == sorted(edges)
    assert all(0 <= edge <= len(text) for edge in edges)
    if not case.eager:
        assert all(isinstance(json.loads(arguments), dict) for _, arguments in whole.calls)
    if whole.calls:
        return
    said = "".join(shown for _, _, shown in whole.blocks)
    if case.thoughts is None:
        assert said == text
    elif not case.thoughts.muted or not regex.search(case.thoughts.muted, case.prompt_end + text):
        assert unmarked(said) == unmarked(text)
        assert is_part(without_space(said), without_space(text))
        lost = len(without_space(text)) - len(without_space(said))
        assert lost <= length_of_marks(case.thoughts, case.prompt_end + text)


def unmarked(text: str) -> str:
    return "".join(character for character in text if character in UNMARKED)


def without_space(text: str) -> str:
    return "".join(text.split())


def is_part(text: str, of: str) -> bool:
    """Whether `text` is left of another text where characters are taken out of that."""
    rest = iter(of)
    return all(character in rest for character in text)


def length_of_marks(thoughts: Thoughts, text: str) -> int:
    """How many characters of a text may be marks."""
    ways = [regex.escape(mark) for mark in thoughts.closings] + [thoughts.open.pattern, *thoughts.dropped]
    return sum(len(found.group()) for way in ways if way for found in regex.finditer(way, text, overlapped=True))


@pytest.mark.parametrize("notation", NOTATIONS, ids=lambda notation: notation.names[0])
def test_any_text_is_read_alike_however_it_is_cut(notation: Notation) -> None:
    @settings(max_examples=NUM_EXAMPLES, deadline=None)
    @given(cases(notation), st.lists(st.integers(0, 10_000), max_size=5))
    def run(case: Case, cuts: Sequence[int]) -> None:
        check(case, cuts)

    run()


def case_of(notation: Notation | None, thoughts: Thoughts, prompt_end: str, *parts: str) -> Case:
    return Case(notation, thoughts, prompt_end, False, False, None, parts)


def test_calls_in_an_open_thought_are_counted_on_from_those_before_it() -> None:
    call = HERMES.write(CALLS[1:2])
    opening = HARMONY_THINK.opening
    case = case_of(HERMES, HARMONY_THINK, "", call, opening, "Hm. ", call)
    check(case, [])
    kinds = [kind for kind, _, _ in read(case, case.parts).blocks]
    assert kinds == ["call", "reasoning", "call"]


def test_text_before_calls_in_an_open_thought_is_thought() -> None:
    case = case_of(HERMES, THINK, "<think>", HERMES.write(CALLS[3:]), " So: ", HERMES.write(CALLS[1:2]))
    check(case, [])
    kinds = [kind for kind, _, _ in read(case, case.parts).blocks]
    assert kinds == ["reasoning", "call"]


def test_white_space_before_a_mark_waits_for_what_the_mark_is() -> None:
    check(case_of(HARMONY, HARMONY_THINK, "", "One.", "\n", "<|channel|>commentary to=python", "<|message|>5"), [])
    check(case_of(None, HARMONY_THINK, "", "One. ", HARMONY_THINK.opening, "Hm."), [])
