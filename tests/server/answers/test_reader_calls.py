"""Calls are found in text however it is cut into deltas, and what is none stays text."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mini_sglang.server.answers.deltas import Answer, CallArguments, CallOpening
from mini_sglang.server.answers.reader import AnswerReader
from mini_sglang.text.notation import Notation
from mini_sglang.text.notations import HERMES, LLAMA3, MISTRAL, TOOL_CALL_PARSERS

NAMES = ("get_time", "add")
NOTATIONS = {"hermes": HERMES, "llama3": LLAMA3, "mistral": MISTRAL}

Summary = tuple[str, list[tuple[str, str]]]


def summary(answer: Answer) -> Summary:
    """The content, and the name and arguments of each call: all but the ids, which are drawn."""
    return answer.content, [(call.name, call.text) for call in answer.calls]


def reader(notation: Notation, **settings: Any) -> AnswerReader:
    return AnswerReader(None, notation, dict.fromkeys(NAMES), **settings)


def parse(notation: Notation, *parts: str, **settings: Any) -> Summary:
    parser = reader(notation, **settings)
    deltas = [delta for part in parts for delta in parser.push(part)]
    return summary(Answer.of([*deltas, *parser.push("", final=True)]))


def call(name: str, **arguments: Any) -> str:
    return json.dumps({"name": name, "arguments": arguments})


TIME = ("get_time", '{"zone": "Lima"}')
HERMES_TIME = f"<tool_call>\n{call('get_time', zone='Lima')}\n</tool_call>"
WRITTEN: list[tuple[str, str, Summary]] = [
    ("hermes", HERMES_TIME, ("", [TIME])),
    ("hermes", f"Let me look.\n{HERMES_TIME}\n", ("Let me look.", [TIME])),
    ("hermes", f"{HERMES_TIME}\n{HERMES_TIME}", ("", [TIME, TIME])),
    ("hermes", f"One.\n{HERMES_TIME}\nTwo.", ("One.\nTwo.", [TIME])),
    ("hermes", f"<tool_call>{call('get_time', zone='Lima')}", ("", [TIME])),
    (
        "hermes",
        '<tool_call>{"arguments": {"a": [1, {}]}, "name": "add"}</tool_call>',
        ("", [("add", '{"a": [1, {}]}')]),
    ),
    ("hermes", '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', ("", [("add", '{"a": 1}')])),
    ("hermes", '<tool_call>{"name": "add"}</tool_call>', ("", [("add", "{}")])),
    ("llama3", '{"name": "get_time", "parameters": {"zone": "Lima"}}', ("", [TIME])),
    ("llama3", '<|python_tag|>{"name": "get_time", "parameters": {"zone": "Lima"}}', ("", [TIME])),
    ("llama3", '{"type": "function", "name": "get_time", "parameters": {"zone": "Lima"}}', ("", [TIME])),
    ("llama3", '\n{"name": "add"}; {"name": "add", "arguments": {}}', ("", [("add", "{}"), ("add", "{}")])),
    ("llama3", '{"name": "add"}\nDone.', ("Done.", [("add", "{}")])),
    ("mistral", f"[TOOL_CALLS] [{call('get_time', zone='Lima')}]", ("", [TIME])),
    ("mistral", f"[TOOL_CALLS][{call('add')}, {call('add', a=1)}]", ("", [("add", "{}"), ("add", '{"a": 1}')])),
    ("mistral", '[TOOL_CALLS]get_time[ARGS]{"zone": "Lima"}', ("", [TIME])),
    ("mistral", '[TOOL_CALLS]get_time[CALL_ID]a1b2c3d4e[ARGS]{"zone": "Lima"}', ("", [TIME])),
    ("mistral", 'So: [TOOL_CALLS]add{"a": 1}[TOOL_CALLS]add{}', ("So:", [("add", '{"a": 1}'), ("add", "{}")])),
]
NO_CALLS: list[tuple[str, str]] = [
    ("hermes", "Just text, 1 < 2, <tool>, <tool_cal"),
    ("hermes", "  white space \n"),
    ("hermes", "I would write <tool_call> here.</tool_call>"),
    ("hermes", '<tool_call>\n{"name": "add", "arguments": {"a": nothing}}\n</tool_call>'),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1}</tool_call>'),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": "1}}</tool_call>'),
    ("hermes", "<tool_call>{'name': 'add'}</tool_call>"),
    ("hermes", '<tool_call>{"name": "add", "arguments": [1]}</tool_call>'),
    ("hermes", '<tool_call>{"name": "add", "arguments": "five"}</tool_call>'),
    ("hermes", '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "not_offered", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": '),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": ' + "[" * 5000 + "]" * 5000 + "}}</tool_call>"),
    ("hermes", "<tool_call>" + " " * 1000 + "{}"),
    ("llama3", "The answer is {}."),
    ("llama3", '{"city": "Lima", "country": {"name": "Peru"}}'),
    ("llama3", '{"name": "Alice", "parameters": {}}'),
    ("llama3", "<|python_tag|>print(5)"),
    ("llama3", ""),
    ("mistral", "[TOOL_CALLS] [1, 2]"),
    ("mistral", "[TOOL_CALLS]add is what I would call"),
    ("mistral", '[TOOL_CALLS][{"name": "add", "arguments": {}'),
]


@pytest.mark.parametrize(("notation", "text", "expected"), WRITTEN)
def test_calls_are_found_in_every_notation(notation: str, text: str, expected: Summary) -> None:
    assert parse(NOTATIONS[notation], text) == expected
    assert parse(NOTATIONS[notation], *text) == expected


@pytest.mark.parametrize(("notation", "text"), NO_CALLS)
def test_what_is_no_call_stays_text(notation: str, text: str) -> None:
    assert parse(NOTATIONS[notation], text) == (text, [])
    assert parse(NOTATIONS[notation], *text) == (text, [])


def test_white_space_between_the_ends_of_an_eager_call_is_no_text() -> None:
    text = '<tool_call>\n{"name": "add", "arguments": {"a": 1}\n }\n</tool_call>'
    assert parse(HERMES, text, eager=True) == ("", [("add", '{"a": 1}')])
    assert parse(HERMES, *text, eager=True) == ("", [("add", '{"a": 1}')])


def test_an_eager_call_is_found_behind_one_of_an_unknown_function() -> None:
    unknown = f"<tool_call>{call('launch')}</tool_call>"
    parser = reader(HERMES, eager=True)
    deltas = parser.push(unknown + HERMES_TIME, final=True)
    assert summary(Answer.of(deltas)) == (unknown, [TIME])


def test_a_call_after_a_broken_one_is_found() -> None:
    broken = '<tool_call>{"name": "add", "arguments": {"a": 1}</tool_call>'
    assert parse(HERMES, f"{broken}\n{HERMES_TIME}") == (broken, [TIME])
    assert parse(HERMES, f"{broken}\n{HERMES_TIME.removesuffix('</tool_call>')}") == (broken, [TIME])


def test_text_is_given_out_as_it_comes() -> None:
    parser = reader(HERMES)
    assert Answer.of(parser.push("Hello, wor")).content == "Hello, wor"
    assert Answer.of(parser.push("ld. 1 <")).content == "ld. 1"
    assert Answer.of(parser.push(" 2")).content == " < 2"
    llama = reader(LLAMA3)
    assert Answer.of(llama.push("T")).content == "T"


def test_a_call_is_given_out_when_its_object_ends() -> None:
    parser = reader(HERMES)
    assert parser.push("<tool_call>" + call("add", a=1)[:-1]) == []
    opening, arguments = parser.push("}")
    assert isinstance(opening, CallOpening)
    assert arguments == CallArguments(0, '{"a": 1}')


@pytest.mark.parametrize(
    ("notation", "text"),
    [
        (HERMES, HERMES_TIME),
        (LLAMA3, '{"name": "get_time", "parameters": {"zone": "Lima"}}'),
        (MISTRAL, f"[TOOL_CALLS][{call('get_time', zone='Lima')}]"),
        (MISTRAL, '[TOOL_CALLS]get_time[ARGS]{"zone": "Lima"}'),
    ],
)
def test_eager_arguments_come_as_they_are_written(notation: Notation, text: str) -> None:
    parser = reader(notation, eager=True)
    deltas = [delta for character in text for delta in parser.push(character)]
    arguments = [delta.text for delta in deltas if isinstance(delta, CallArguments)]
    assert len(arguments) == len("".join(arguments))
    assert summary(Answer.of(deltas)) == ("", [TIME])


def test_eager_arguments_that_are_cut_off_end_where_the_text_does() -> None:
    assert parse(HERMES, HERMES_TIME.partition("ma")[0], eager=True) == ("", [("get_time", '{"zone": "Li')])


def test_calls_beyond_the_most_are_dropped() -> None:
    for eager in (False, True):
        assert parse(HERMES, f"{HERMES_TIME}\n{HERMES_TIME} Done.", max_calls=1, eager=eager) == ("Done.", [TIME])


def test_ids_are_as_the_apis_and_templates_want_them() -> None:
    ids = [Answer.of(reader(HERMES).push(HERMES_TIME)).calls[0].call_id for _ in range(2)]
    assert ids[0] != ids[1]
    assert ids[0].startswith("call_")
    [mistral] = Answer.of(reader(MISTRAL).push("[TOOL_CALLS]add{}")).calls
    assert len(mistral.call_id) == 9
    assert mistral.call_id.isalnum()


FRAGMENTS = [
    "<tool_call>",
    "[TOOL_CALLS]",
    *(text for _, text, _ in WRITTEN),
    *(text for _, text in NO_CALLS if len(text) < 100),
    *(
        "</tool_call>",
        "<|python_tag|>",
        "[ARGS]",
        "{",
        "}",
        '"',
        "\\",
        ",",
        ";",
        "]",
        "[",
        " ",
        "\n",
        "<",
        "<tool",
        "x",
        "é🦩",
    ),
    *('{"name": "add", "arguments": {', '{"name": "add"}', '"a": "\\"}', "}}"),
]


@given(
    st.sampled_from(sorted(NOTATIONS)),
    st.lists(st.sampled_from(FRAGMENTS), max_size=8).map("".join),
    st.booleans(),
    st.sampled_from([None, 1]),
    st.randoms(use_true_random=False),
)
def test_cuts_make_no_difference(notation: str, text: str, eager: bool, max_calls: int | None, random: Random) -> None:
    settings = {"eager": eager, "max_calls": max_calls}
    whole = parse(NOTATIONS[notation], text, **settings)
    assert parse(NOTATIONS[notation], *text, **settings) == whole
    cuts = sorted(random.randint(0, len(text)) for _ in range(4))
    deltas = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert parse(NOTATIONS[notation], *deltas, **settings) == whole
    if not eager:
        assert all(isinstance(json.loads(arguments), dict) for _, arguments in whole[1])


@given(
    st.text(alphabet=' \n<>{}[]"\\,;tol_cal/TOLCARGS|pythn', max_size=60), st.sampled_from(sorted(TOOL_CALL_PARSERS))
)
def test_no_text_is_lost(text: str, name: str) -> None:
    content, calls = parse(TOOL_CALL_PARSERS[name], *text)
    assert calls or content == text


def test_a_long_call_costs_time_in_proportion() -> None:
    parser = reader(HERMES)
    text = "<tool_call>" + call("add", text='{"<\\' * 25_000) + "</tool_call>"
    deltas = [delta for start in range(0, len(text), 4) for delta in parser.push(text[start : start + 4])]
    assert len(Answer.of(deltas).calls[0].text) > 100_000
