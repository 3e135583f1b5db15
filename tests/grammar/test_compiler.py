"""Answers follow their grammar token by token, grammars that cannot be followed are refused by name, endings fit."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest

from mini_sglang.grammar.calls import tool_call_grammar
from mini_sglang.grammar.compiler import GrammarCompiler
from mini_sglang.sampling_params import SamplingParams
from mini_sglang.text.notation import Notation
from mini_sglang.text.notations import HERMES
from mini_sglang.text.tokenizer import Tokenizer

ADDRESS = {
    "type": "object",
    "properties": {name: {"type": "string"} for name in ("city", "street", "zip")},
    "required": ["city", "street", "zip"],
    "additionalProperties": False,
}
CALL = '{"name": "get_time", "arguments": {"zone": "Lima"}}'
FUNCTIONS: dict[str, Any] = {
    "get_time": {
        "type": "object",
        "properties": {"zone": {"$ref": "#/$defs/zone"}},
        "required": ["zone"],
        "additionalProperties": False,
        "$defs": {"zone": {"type": "string"}},
    },
    "stop": None,
}

Accepts = Callable[[SamplingParams, str], bool]


def json_schema(schema: Any, **fields: Any) -> SamplingParams:
    return SamplingParams(response_format={"type": "json_schema", "json_schema": {"schema": schema, **fields}})


@pytest.fixture(scope="module")
def accepts(compiler: GrammarCompiler, builtin_tokenizer: Tokenizer) -> Accepts:
    """`accepts(params, text)`: whether the text, token by token, is a whole answer."""

    def check(params: SamplingParams, text: str) -> bool:
        matcher = compiler.compile(params)
        for token_id in builtin_tokenizer.encode(text, add_special_tokens=False):
            if not allows(matcher.mask(), token_id):
                return False
            matcher.advance(token_id)
        return allows(matcher.mask(), min(builtin_tokenizer.eos_token_ids))

    return check


def allows(mask: bytes, token_id: int) -> bool:
    return bool(mask[token_id >> 3] >> (token_id & 7) & 1)


@pytest.mark.parametrize(
    ("params", "right", "wrong"),
    [
        (SamplingParams(regex=r"\d{3}-\d{4}"), ["555-1234"], ["555-123", "555-12345", "٣٣٣-1234", ""]),
        (SamplingParams(regex="a/b\n|é+中"), ["a/b\n", "éé中"], ["a/b", "中"]),
        (
            SamplingParams(choice=["red", "green\nblue", 'q"uote\\', "🙂"]),
            ["red", "green\nblue", 'q"uote\\', "🙂"],
            ["blue"],
        ),
        (SamplingParams(choice=["a", "ab"]), ["a", "ab"], ["b", "abb"]),
        (SamplingParams(ebnf='root ::= "a" digit+\ndigit ::= [0-9]'), ["a1", "a123"], ["a", "1"]),
        (SamplingParams(ebnf='start: "a" DIGIT+\nDIGIT: /[0-9]/'), ["a1", "a123"], ["a", "1"]),
        (
            SamplingParams(response_format={"type": "json_object"}),
            ['{"a": [1, {"b": null}]}', "{}"],
            ["[1]", "1", "{a: 1}"],
        ),
        (json_schema({"type": "array", "items": {"enum": [1, "x"]}, "minItems": 2}), ['[1, "x"]'], ["[1]", "[1, 2]"]),
        (
            json_schema({"$defs": {"t": {"type": "array", "items": {"$ref": "#/$defs/t"}}}, "$ref": "#/$defs/t"}),
            ["[[], [[]]]"],
            ["[1]"],
        ),
    ],
)
def test_an_answer_is_what_its_grammar_says(
    accepts: Accepts, params: SamplingParams, right: list[str], wrong: list[str]
) -> None:
    assert [text for text in right if not accepts(params, text)] == []
    assert [text for text in wrong if accepts(params, text)] == []


def test_white_space_in_json_is_bounded_and_covers_the_usual_ways_to_write_it(accepts: Accepts) -> None:
    address = {"city": "a", "street": "b", "zip": "c"}
    for separators, indent in (((",", ":"), None), ((", ", ": "), None), ((",", ": "), 2), ((",", ": "), 4)):
        assert accepts(json_schema(ADDRESS), json.dumps(address, separators=separators, indent=indent))
    text = json.dumps(address)
    for run in (" " * 2, "\n\n", "\t", "\n" + " " * 17):
        assert not accepts(json_schema(ADDRESS), text.replace(", ", f",{run}"))
    assert not accepts(
        json_schema({**ADDRESS, "x-guidance": {"whitespace_flexible": True}}), text.replace(", ", ",\n\n")
    )
    assert not accepts(json_schema(ADDRESS), f" {text}")
    assert not accepts(json_schema(ADDRESS), f"{text} ")


def test_only_a_strict_schema_must_be_followed_in_all_its_keywords(compiler: GrammarCompiler) -> None:
    for schema in (
        {"type": "array", "uniqueItems": True},
        {"oneOf": [{"type": "string"}, {"maxLength": 3, "type": "string"}]},
    ):
        compiler.compile(json_schema(schema))
        with pytest.raises(ValueError, match=r"^response_format cannot be followed"):
            compiler.compile(json_schema(schema, strict=True))


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (SamplingParams(regex="["), "^regex cannot be followed: .*unclosed character class"),
        (SamplingParams(regex="(?=a)b"), "^regex cannot be followed"),
        (SamplingParams(ebnf="root ::= x"), "^ebnf cannot be followed: Rule 'x' not found"),
        (SamplingParams(ebnf="root ::= " + "(" * 5000 + '"a"' + ")" * 5000), "^ebnf cannot be followed"),
        (SamplingParams(ebnf="start: " + "(" * 5000 + '"a"' + ")" * 5000), "^ebnf cannot be followed"),
        (SamplingParams(ebnf="start: start"), "^ebnf"),
        (json_schema({"$ref": "#"}), "^response_format"),
        (json_schema({"$ref": "https://example.com/x.json"}), "^response_format cannot be followed: .*example.com"),
        (json_schema({"$ref": "file:///etc/passwd"}), "^response_format cannot be followed"),
        (json_schema({"type": "nonsense"}), "^response_format cannot be followed"),
    ],
)
def test_what_cannot_be_followed_is_refused_by_name(
    compiler: GrammarCompiler, params: SamplingParams, message: str
) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        compiler.compile(params)
    assert len(str(raised.value)) < 400
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"regex": ""}, "regex must be a string that is not empty"),
        ({"regex": 5}, "regex must be a string"),
        ({"ebnf": "x" * (1 << 19)}, "ebnf may take at most 262144 characters, got 524288"),
        ({"choice": []}, "choice must hold at least one string"),
        ({"choice": "red"}, "choice must be a list"),
        ({"choice": ["red", "\ud800"]}, "choice must hold strings of whole characters"),
        ({"choice": ["x" * (1 << 19)]}, "choice may take at most"),
        ({"regex": "a", "choice": ["a"]}, "regex cannot be combined with choice"),
        ({"regex": "a", "allowed_token_ids": [1]}, "regex cannot be combined with allowed_token_ids"),
        ({"response_format": {"type": "yaml"}}, "response_format must have a type of text, json_object or json_schema"),
        (
            {"response_format": {"type": "json_object", "schema": {}}},
            "response_format .* must not have the field 'schema'",
        ),
        ({"response_format": {"type": "json_schema"}}, "response_format must be like"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": True}}}, "response_format must be like"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"x": {1}}}}},
            "response_format must hold a schema",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"maximum": 10**400}}}},
            "response_format must",
        ),
    ],
)
def test_malformed_fields_are_refused_before_anything_is_compiled(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        SamplingParams(**fields).validate()


def test_plain_text_is_no_grammar() -> None:
    params = SamplingParams(response_format={"type": "text"})
    params.validate()
    assert not params.is_constrained


def test_free_text_may_come_first_and_then_the_grammar_holds(accepts: Accepts) -> None:
    for marker in ("</think>", "<|im_start|>"):  # the second is a special token
        params = SamplingParams(choice=["yes", "no"], grammar_after=marker)
        assert accepts(params, f"So <b>it</b> is?\n{marker}\n\nyes")
        assert accepts(params, f"{marker}no")
        assert not accepts(params, f"So it is.\n{marker}\n\nmaybe")
        assert not accepts(params, "So it is.")


BARE = Notation(names=("bare",), call="{object}", leading=True)


@pytest.mark.parametrize(
    ("syntax", "calls"),
    [
        (HERMES, f"<tool_call>\n{CALL}\n</tool_call>§\n<tool_call>\n{CALL}\n</tool_call>§"),
        (dataclasses.replace(BARE, separator="; "), f"{CALL}§; {CALL}§"),
        (
            dataclasses.replace(BARE, begin="[TOOL_CALLS] [", end="]", separator=", "),
            f"[TOOL_CALLS] [{CALL}§, {CALL}§]",
        ),
        (dataclasses.replace(BARE, begin="<|im_start|>[", end="]", separator=", "), f"<|im_start|>[{CALL}§, {CALL}§]"),
    ],
)
def test_calls_follow_their_syntax_and_their_schemas(
    accepts: Accepts, builtin_tokenizer: Tokenizer, syntax: Notation, calls: str
) -> None:
    first, second, end = calls.split("§")
    many = SamplingParams(tool_grammar=tool_call_grammar(FUNCTIONS, syntax, builtin_tokenizer))
    one = SamplingParams(tool_grammar=tool_call_grammar(FUNCTIONS, syntax, builtin_tokenizer, parallel=False))
    assert accepts(many, first + end)
    assert accepts(many, first + second + end)
    assert accepts(one, first + end)
    assert not accepts(one, first + second + end)
    assert accepts(one, first.replace(CALL, '{"name": "stop", "arguments": {}}') + end)
    for wrong in (CALL.replace("zone", "place"), CALL.replace("get_time", "get_date"), CALL.replace('"Lima"', "5")):
        assert not accepts(many, first.replace(CALL, wrong) + end)
    assert not accepts(many, f"Let me see. {first}{end}")


def test_text_before_a_call_needs_a_marker(accepts: Accepts, builtin_tokenizer: Tokenizer) -> None:
    grammar = tool_call_grammar(FUNCTIONS, HERMES, builtin_tokenizer, free_text=True)
    params = SamplingParams(tool_grammar=grammar)
    assert accepts(params, f"Let me see.\n<tool_call>\n{CALL}\n</tool_call>")
    assert not accepts(params, "Let me see.\n<tool_call>\nHm.")
    with pytest.raises(ValueError, match="needs a marker"):
        tool_call_grammar(FUNCTIONS, BARE, builtin_tokenizer, free_text=True)
    with pytest.raises(ValueError, match="at least one function"):
        tool_call_grammar({}, HERMES, builtin_tokenizer)


@pytest.mark.parametrize("limit", [24, 30, 40, 100])
def test_json_is_closed_before_its_limit_cuts_it_off(
    compiler: GrammarCompiler, builtin_tokenizer: Tokenizer, limit: int
) -> None:
    """With a model that never ends a string, nor an array, if it is left to itself."""
    people = {"type": "array", "items": ADDRESS}
    rambling = builtin_tokenizer.encode(" and", add_special_tokens=False)[0]
    for schema in (ADDRESS, {"type": "array", "items": {"type": "string"}}, people, {"type": "object"}):
        matcher, answer = compiler.compile(json_schema(schema), limit), []
        while not matcher.is_finished:
            mask = matcher.mask()
            choices = [token_id for token_id in range(len(mask) * 8) if allows(mask, token_id)]
            answer.append(rambling if rambling in choices else choices[0])
            matcher.advance(answer[-1])
        assert len(answer) < limit
        value = json.loads(builtin_tokenizer.decode(answer))
        assert isinstance(value, dict if schema["type"] == "object" else list)


def test_equal_grammars_are_compiled_once_and_followed_apart(compiler: GrammarCompiler) -> None:
    one, other = (
        compiler.compile(SamplingParams(regex="ab")),
        compiler.compile(SamplingParams(regex="ab", temperature=0)),
    )
    first = one.mask()
    one.advance(next(token_id for token_id in range(len(first) * 8) if allows(first, token_id)))
    assert other.mask() == first


def test_a_token_that_does_not_fit_is_an_error_of_the_grammar(compiler: GrammarCompiler) -> None:
    matcher = compiler.compile(SamplingParams(regex="a"))
    with pytest.raises(ValueError, match=r"^regex cannot be followed"):
        matcher.advance(1000)
