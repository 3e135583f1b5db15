"""Schemas as generators write them are followed; what no grammar holds is left out, or refused where it is strict."""

from __future__ import annotations

import json
import random
import warnings
from collections.abc import Callable
from typing import Any

import jsonschema_rs
import pytest

from mini_sglang.grammar.calls import tool_call_grammar
from mini_sglang.grammar.compiler import GrammarCompiler, check_parameters
from mini_sglang.grammar.schema import SchemaError, followable
from mini_sglang.sampling_params import SamplingParams
from mini_sglang.text.notation import Notation
from mini_sglang.text.tokenizer import Tokenizer

BARE = Notation(names=("bare",), call="{object}", leading=True)
Answers = Callable[..., list[Any]]
Json = dict[str, Any]


def typed(schema: Any, *, strict: bool = False) -> SamplingParams:
    params = SamplingParams(
        response_format={"type": "json_schema", "json_schema": {"schema": schema, "strict": strict}}
    )
    params.validate()
    return params


@pytest.fixture(scope="module")
def answers(compiler: GrammarCompiler, builtin_tokenizer: Tokenizer) -> Answers:
    """`answers(schema)`: values that a model which draws at random answers with, those of whole answers."""

    def answer(params: SamplingParams, chance: random.Random) -> Any:
        matcher = compiler.compile(params, 200)
        token_ids: list[int] = []
        end = min(builtin_tokenizer.eos_token_ids)
        while not matcher.is_finished:
            allowed = int.from_bytes(matcher.mask(), "little")
            if len(token_ids) == 200 or (allowed >> end & 1 and chance.random() < 0.5):
                break
            allowed &= ~(1 << end)
            if not allowed:
                break
            ahead = allowed >> (first := chance.randrange(allowed.bit_length())) << first
            token_ids.append((ahead & -ahead).bit_length() - 1)
            matcher.advance(token_ids[-1])
        return json.loads(builtin_tokenizer.decode(token_ids)) if len(token_ids) < 200 else None

    def answers(schema: Any, count: int = 8, strict: bool = True) -> list[Any]:
        params = typed(schema, strict=strict)
        compiler.check(params)
        return [answer(params, random.Random(seed)) for seed in range(count)]

    return answers


NAMED_TWICE = {
    "type": "object",
    "properties": {"n": {"type": "integer"}},
    "patternProperties": {"^n$": {"type": "integer"}},
    "required": ["n"],
    "additionalProperties": False,
}
TREE = {
    "$defs": {
        "Node": {
            "title": "Node",
            "type": "object",
            "properties": {
                "value": {"type": "integer", "title": "Value", "default": 0},
                "next": {"anyOf": [{"$ref": "#/$defs/Node"}, {"type": "null"}], "default": None},
            },
            "required": ["value", "next"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/Node",
}
PETS = {
    "type": "object",
    "properties": {
        "pet": {
            "discriminator": {"propertyName": "kind", "mapping": {"cat": "#/$defs/Cat", "dog": "#/$defs/Dog"}},
            "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}],
        }
    },
    "required": ["pet"],
    "additionalProperties": False,
    "$defs": {
        kind: {
            "type": "object",
            "properties": {"kind": {"const": kind.lower(), "type": "string"}, "age": {"type": "integer", "minimum": 0}},
            "required": ["kind", "age"],
            "additionalProperties": False,
        }
        for kind in ("Cat", "Dog")
    },
}


def refers_to_itself(**beside: Any) -> Json:
    return {
        "type": "object",
        "properties": {"c": {"$ref": "#", **beside}, "n": {"type": "null"}},
        "additionalProperties": False,
    }


FOLLOWED: dict[str, Any] = {
    "a type beside a reference to itself": {
        "$defs": {"N": {**refers_to_itself(), "properties": {"c": {"type": "object", "$ref": "#/$defs/N"}}}},
        "$ref": "#/$defs/N",
    },
    "types beside a reference to itself": refers_to_itself(type=["object", "null"], title="C"),
    "a type beside references to itself": {
        **refers_to_itself(),
        "properties": {
            "a": {"type": "object", "allOf": [{"$ref": "#"}]},
            "b": {"type": ["object", "null"], "anyOf": [{"$ref": "#"}, {"type": "null"}]},
            "c": {"allOf": [{"$ref": "#"}, {"type": "object"}]},
            "d": {"type": "object", "allOf": [{"type": "object", "allOf": [{"$ref": "#"}]}]},
        },
    },
    "references to each other": {
        "$defs": {
            "A": {"type": "array", "items": {"type": "object", "$ref": "#/$defs/B"}, "maxItems": 2},
            "B": {
                "type": "object",
                "additionalProperties": {"type": "array", "$ref": "#/$defs/A"},
                "maxProperties": 1,
            },
        },
        "$ref": "#/$defs/A",
    },
    "a property that fits nothing that ends": {
        "type": "object",
        "properties": {"n": {"type": "null"}, "x": {"$ref": "#/$defs/N"}, "y": {"anyOf": [{"$ref": "#/$defs/N"}, {}]}},
        "additionalProperties": False,
        "$defs": {"N": {"type": "object", "properties": {"c": {"$ref": "#/$defs/N"}}, "required": ["c"]}},
    },
    "a recursion with an end": {
        "type": "object",
        "properties": {"c": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
        "required": ["c"],
        "additionalProperties": False,
    },
    "a name that a pattern covers": NAMED_TWICE,
    "names that a pattern covers, and others": {
        **NAMED_TWICE,
        "patternProperties": {
            "^n": {"type": "integer", "multipleOf": 5},
            "^x": {"type": "array", "items": {"type": "string"}},
        },
    },
    "all names that a pattern has": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "patternProperties": {"^(a|b)$": {"minimum": 5}},
        "required": ["a"],
    },
    "Go's map": {"type": "object", "patternProperties": {".*": {"type": "string", "maxLength": 3}}},
    "zod's record": {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "number"}},
    "zod's record of an enum": {
        "type": "object",
        "propertyNames": {"type": "string", "enum": ["a", "b"]},
        "additionalProperties": {"type": "number"},
    },
    "names of a pattern": {"type": "object", "propertyNames": {"pattern": "^x-[a-z]{1,3}$"}, "minProperties": 1},
    "Go's int64": {"type": "integer", "minimum": -9223372036854775808, "maximum": 9223372036854775807},
    "uint64": {"type": "integer", "minimum": 0, "maximum": 18446744073709551615},
    "Java's double": {"type": "number", "minimum": -1.7976931348623157e308, "maximum": 1.7976931348623157e308},
    "protobuf's int64": {
        "anyOf": [
            {"type": "integer", "minimum": -9223372036854776000, "maximum": 9223372036854776000},
            {"type": "string", "pattern": "^-?[0-9]{1,19}$"},
        ]
    },
    "above zero": {"type": "number", "exclusiveMinimum": 0, "maximum": 0.5},
    "below zero": {"type": "number", "exclusiveMaximum": 0, "minimum": -0.5},
    "between": {"type": "number", "exclusiveMinimum": 1, "exclusiveMaximum": 1.5},
    "null beside a type": {"type": ["string", "null"], "maxLength": 3},
    "constants of all types": {"enum": [1, "a", None, True, 1.5, {"a": [1]}, [], ""]},
    "a large constant": {"const": 9223372036854775807},
    "a tree": TREE,
    "a union with a discriminator": PETS,
    "siblings of a reference": {"$defs": {"s": {"type": "string"}}, "$ref": "#/$defs/s", "maxLength": 3, "title": "S"},
    "a reference in allOf": {"allOf": [{"$ref": "#/$defs/o"}], "description": "x", "$defs": {"o": {"type": "boolean"}}},
    "a part with an id": {
        "$id": "https://example.com/person",
        "type": "object",
        "properties": {"a": {"$ref": "address.json"}, "b": {"$ref": "#zip"}},
        "required": ["a", "b"],
        "additionalProperties": False,
        "$defs": {"a": {"$id": "address.json", "type": "boolean"}, "z": {"$anchor": "zip", "type": "null"}},
    },
    "annotations": {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$comment": "x",
        "title": "T",
        "description": "d",
        "type": "string",
        "maxLength": 2,
        "default": "a",
        "examples": ["b"],
        "deprecated": True,
        "readOnly": True,
        "writeOnly": False,
        "contentEncoding": "base64",
        "contentMediaType": "text/plain",
        "x-order": 1,
        "example": "a",
    },
    "a format that is a note": {"type": "integer", "format": "int64", "maximum": 9},
    "a count of few known properties": {
        "type": "object",
        "properties": {name: {"type": "null"} for name in "abcd"},
        "minProperties": 2,
        "maxProperties": 3,
        "required": ["b"],
        "additionalProperties": False,
    },
    "a count of any properties": {"type": "object", "maxProperties": 1, "additionalProperties": {"type": "null"}},
    "a tuple": {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "null"}], "minItems": 2, "maxItems": 2},
    "uniqueItems of one": {"type": "array", "items": {"type": "null"}, "uniqueItems": True, "maxItems": 1},
    "Java's sizes": {"type": "string", "minLength": 0, "maxLength": 2147483647},
    "a length of 64 bits": {"type": "array", "items": {"type": "null"}, "maxItems": 9223372036854775807},
    "a length as a float": {"type": "string", "maxLength": 3.0},
    "anything": {},
    "nothing but true": True,
} | {
    f"format {name}": {"type": "string", "format": name}
    for name in ("date", "time", "date-time", "duration", "ipv4", "ipv6", "uuid", "color", "byte")
}  # fmt: skip


@pytest.mark.parametrize("name", FOLLOWED)
def test_a_schema_is_followed_and_the_same_each_time(answers: Answers, name: str) -> None:
    schema = FOLLOWED[name]
    if schema is True:
        assert followable(True, strict=True) == {}
        return
    fits = jsonschema_rs.validator_for(schema, validate_formats=True)
    values = answers(schema)
    for value in values:
        if value is not None:
            fits.validate(value)
    assert answers(schema) == values


def test_what_other_drafts_and_dialects_write_is_understood(answers: Answers) -> None:
    for schema, meaning in (
        ({"type": "integer", "minimum": 0, "exclusiveMinimum": True, "maximum": 2}, {"enum": [1, 2]}),
        (
            {"type": "array", "items": [{"type": "null"}], "additionalItems": False, "minItems": 1},
            {"const": [None]},
        ),
        ({"type": "string", "maxLength": 1, "nullable": True}, {"type": ["string", "null"], "maxLength": 1}),
        ({"definitions": {"n": {"type": "null"}}, "$ref": "#/definitions/n"}, {"type": "null"}),
        ({"type": "boolean", "items": None, "description": None}, {"type": "boolean"}),
    ):
        fits = jsonschema_rs.validator_for(meaning)
        assert all(map(fits.is_valid, answers(schema)))


@pytest.mark.parametrize("name", ["time", "date-time"])
def test_a_time_has_no_second_60(compiler: GrammarCompiler, builtin_tokenizer: Tokenizer, name: str) -> None:
    date = "2024-02-29T" if name == "date-time" else ""
    for text, fits in ((f'"{date}23:59:59Z"', True), (f'"{date}12:00:60Z"', False), (f'"{date}12:60:00Z"', False)):
        matcher = compiler.compile(typed({"type": "string", "format": name}))
        allowed = []
        for token_id in builtin_tokenizer.encode(text, add_special_tokens=False):
            allowed.append(bool(matcher.mask()[token_id >> 3] >> (token_id & 7) & 1))
            if not allowed[-1]:
                break
            matcher.advance(token_id)
        assert all(allowed) is fits, text


LIST = {"type": "array", "items": {"type": "integer"}}
UNHELD: list[tuple[Any, str]] = [
    ({**LIST, "uniqueItems": True}, "uniqueItems"),
    ({**LIST, "contains": {"const": 1}}, "contains"),
    ({"not": {"type": "string"}}, "not"),
    ({"if": {"type": "string"}, "then": {"maxLength": 2}}, "if"),
    ({"type": "object", "propertyNames": {"maxLength": 3}}, "propertyNames"),
    ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
    ({"type": "object", "dependentSchemas": {"a": {"required": ["b"]}}}, "dependentSchemas"),
    ({"type": "object", "allOf": [{"type": "object"}], "unevaluatedProperties": False}, "unevaluatedProperties"),
    ({"type": "object", "minProperties": 2}, "minProperties"),
    ({"type": "object", "properties": {"a": {}}, "maxProperties": 1}, "maxProperties"),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
    ({"type": "string", "pattern": "^(?!x)[a-z]+$"}, "pattern"),
    ({"type": "string", "pattern": r"(a)\1"}, "pattern"),
    ({"oneOf": [{"const": 1}, {"const": 1.0}]}, "oneOf"),
    ({"oneOf": [{"enum": [{"a": [1]}]}, {"const": {"a": [1.0]}}]}, "oneOf"),
    ({"type": "integer", "minimum": 9007199254740993, "maximum": 9007199254740993}, "minimum and maximum allow no"),
    ({"type": "number", "minimum": 9007199254740993, "maximum": 9007199254740993}, "minimum and maximum allow no"),
    ({"type": "integer", "minimum": 9223372036854775807}, "minimum may be at most"),
    ({"type": ["integer", "null"], "maximum": -9223372036854775801}, "maximum must be at least"),
    ({"enum": [18446744073709551615, 9223372036854775808]}, "enum may hold integers of 64 bits"),
    ({"const": 9007199254740993}, "const may hold no integer that a float"),
    ({"type": "integer", "const": -9223372036854775808}, "const may hold no integer that a float"),
    ({"type": "number", "minimum": 10**25}, "minimum may be at most"),
    ({"type": "number", "minimum": 1e19}, "minimum may be at most"),
    ({"type": "number", "minimum": 1e300}, "minimum must be within"),
    ({"type": "integer", "minimum": 2**63, "maximum": 2**64 - 1}, "minimum may be at most"),
    ({"type": "number", "multipleOf": 10_000_019}, "multipleOf may be at most"),
    ({"type": "integer", "multipleOf": 1_000_000, "minimum": 1}, "multipleOf may be at most"),
    ({**LIST, "minItems": 20_000}, "minItems may be at most"),
    ({"type": "string", "minLength": 200_000}, "minLength may be at most"),
    *(
        ({"type": "string", "pattern": pattern}, "pattern '.*' .*a grammar")
        for pattern in (
            *(
                r"^(?!\s)\p{L}+$",
                r"^(?=.*\p{Lu}).{8,}$",
                r"(?<y>\d{4})(?=-)",
                r"(?<=a+)b",
                r"^(?!a)\z",
                r"(?<q>a)\k<q>",
            ),
            *(
                r"\cA",
                r"^\h+$",
                r"^\R$",
                r"[\b]",
                "[]",
                "[^]",
                "(?>a)b",
                "a{,3}",
                r"\Q(\E",
                r"^(?!a)[[:alpha:]&&[^b]]$",
            ),
        )
    ),
    ({"type": "object", "patternProperties": {r"^(?!_)\p{L}": {}}}, "patternProperties '.*' has look-around"),
    ({"type": "string", "format": "uri-reference"}, "format"),
    ({"anyOf": [{"type": "number"}, {"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"}]}, "pattern"),
]


@pytest.mark.parametrize(("schema", "keyword"), UNHELD)
def test_what_no_grammar_holds_is_left_to_the_model_unless_the_schema_is_strict(
    compiler: GrammarCompiler, builtin_tokenizer: Tokenizer, schema: Any, keyword: str
) -> None:
    within = {"type": "object", "properties": {"a": {"type": "array", "items": schema}}}
    compiler.check(typed(schema))
    compiler.check(typed(within))
    message = rf'^response_format cannot be followed: property "a\[\]": {keyword}'
    with pytest.raises(ValueError, match=message) as error:
        compiler.check(typed(within, strict=True))
    assert "nimplemented" not in str(error.value)

    def calls(strict: list[str]) -> SamplingParams:
        functions = {"plain": None, "find": within}
        return SamplingParams(tool_grammar=tool_call_grammar(functions, BARE, builtin_tokenizer, strict=strict))

    compiler.check(calls([]))
    with pytest.raises(ValueError, match=rf'^tools cannot be followed: tool "find": property "a\[\]": {keyword}'):
        compiler.check(calls(["find"]))


BESIDE: list[tuple[Json, str]] = [
    ({"required": ["n"]}, "required"),
    ({"type": "object", "maxProperties": 1}, "maxProperties"),
    ({"type": "object", "required": ["n"], "description": "x"}, "required"),
    ({"allOf": [{"required": ["n"]}]}, "allOf"),
    ({"anyOf": [{"required": ["n"]}, {"required": ["c"]}]}, "anyOf"),
    ({"type": "array"}, "type"),
]


@pytest.mark.parametrize(("beside", "keyword"), BESIDE)
def test_what_stands_beside_a_reference_that_leads_back_is_left_to_the_model(
    answers: Answers, beside: Json, keyword: str
) -> None:
    schema = refers_to_itself(**beside)
    fits = jsonschema_rs.validator_for(refers_to_itself())
    assert all(value is None or fits.is_valid(value) for value in answers(schema, strict=False))
    with pytest.raises(
        SchemaError, match=rf'^property "c": {keyword} beside a \$ref that leads back to where it is can'
    ):
        followable(schema, strict=True)


NEEDY = {"type": "object", "properties": {"c": {"$ref": "#/$defs/N"}}}
REFUSED: list[tuple[Any, str]] = [
    ({"type": "nonsense"}, "type must be one of null, boolean"),
    ({"type": []}, "type must be"),
    ({"$ref": "#"}, r"\$ref '#' refers to itself"),
    ({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"anyOf": [{"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"}, "itself"),
    ({"$ref": "https://example.com/x.json"}, "example.com/x.json' is not to a part of the schema"),
    ({"$ref": "#/$defs/missing"}, "leads to no schema"),
    *(
        (schema, "none that ends fits")
        for schema in (
            {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
            {"type": "array", "prefixItems": [{"type": "null"}, {"$ref": "#"}], "minItems": 2},
            {"type": "object", "additionalProperties": {"$ref": "#"}, "minProperties": 1},
            {**refers_to_itself(), "required": ["c"]},
            {**refers_to_itself(allOf=[{"required": ["n"]}]), "required": ["c"]},
            {**refers_to_itself(), "allOf": [{"required": ["n", "c"]}]},
            {**refers_to_itself(), "anyOf": [{"required": ["n", "c"]}, {"required": ["c"]}]},
            {"$defs": {"N": {**NEEDY, "required": ["c"]}}, "$ref": "#/$defs/N"},
            {
                "$defs": {"N": {**NEEDY, "required": ["c"]}},
                "type": "array",
                "items": {"$ref": "#/$defs/N"},
                "minItems": 1,
            },
        )
    ),
    ({"type": "string", "pattern": "("}, r"pattern '\(' is no regular expression"),
    *(
        ({"type": "string", "pattern": pattern}, "is no regular expression")
        for pattern in ("a)", "(?!a", "(?<n>a", "a\\", "(?=a)\\", "[a", "[z-a]", "a{3,1}", "*a", "a|+", "(?!a)(+b)")
    ),
    ({"type": "string", "pattern": 5}, "pattern must be a regular expression"),
    ({"type": "string", "minLength": 5, "maxLength": 2}, "maxLength, minLength, type together allow no value"),
    ({"type": "string", "minLength": -1}, "minLength must be an integer"),
    ({"type": "integer", "minimum": 5, "maximum": 2}, "minimum and maximum allow no number"),
    ({"type": "integer", "exclusiveMinimum": 1, "exclusiveMaximum": 2}, "allow no number"),
    ({"type": "number", "minimum": "5"}, "minimum must be a number"),
    ({"type": "number", "multipleOf": 0}, "multipleOf must be a number greater than 0"),
    ({"enum": []}, "enum must be a list"),
    ({"type": "object", "required": ["a"], "additionalProperties": False}, "together allow no value"),
    ({"type": "object", "required": "a"}, "required must be a list of names"),
    ({"type": "object", "properties": ["a"]}, "properties must be an object"),
    ({"type": "object", "properties": {"a": 5}}, 'property "a": a schema must be an object or a boolean'),
    ({"type": "object", "patternProperties": {"^a": {}, "b$": {}}}, "patterns that may match one name"),
    ({"allOf": [{"type": "string"}, {"type": "null"}]}, "allOf together allow no value"),
    ({"anyOf": []}, "anyOf must be a list"),
    (False, "allows no value"),
]


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(("schema", "message"), REFUSED)
def test_what_cannot_be_meant_is_refused_in_words(schema: Any, message: str, strict: bool) -> None:
    for _ in range(2):
        with pytest.raises(SchemaError, match=message):
            followable(schema, strict=strict, blame=True)


def test_a_pattern_of_another_dialect_is_no_reason_for_a_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for pattern in ("[a-z&&[^b]]", "(?!x)[a-z&&[^b]]", "(?!x)[[a]--b||c]"):
            assert followable({"type": "string", "pattern": pattern}, strict=False)["type"] == "string"


@pytest.mark.parametrize(
    "schema",
    [
        *({}, {"type": ["object", "null"]}, {"const": {}}, {"enum": [1, {}]}),
        *({"anyOf": [{"type": "string"}, {"type": "object"}]}, {"oneOf": [{"$ref": "#/$defs/o"}], "$defs": {"o": {}}}),
        {"$ref": "#/$defs/o", "$defs": {"o": {"type": ["object", "null"], "properties": {"o": {"$ref": "#/$defs/o"}}}}},
        {"type": "object", "patternProperties": {"^[])]$": {"type": "string", "pattern": "^(?![(])\\cA"}}},
    ],
)
def test_parameters_that_an_object_may_fit_are_taken(schema: Json) -> None:
    check_parameters(schema)


@pytest.mark.parametrize("schema", [{"const": 2**64}, {"enum": [[2**70], 1]}, {"const": {"a": -(2**64)}}])
def test_constants_beyond_64_bits_are_left_to_the_model(schema: Json) -> None:
    assert followable(schema, strict=False) == {}
    with pytest.raises(SchemaError, match=r"^(const|enum) may hold integers of 64 bits"):
        followable(schema, strict=True)


def test_a_schema_of_any_depth_is_answered() -> None:
    deep: Json = {"type": "null"}
    for _ in range(300):
        deep = {"type": "array", "items": deep}
    with pytest.raises(SchemaError, match="nested more than 100 deep"):
        followable(deep, strict=False)


def test_arguments_are_an_object_whatever_their_schema_says(
    compiler: GrammarCompiler, builtin_tokenizer: Tokenizer
) -> None:
    def calls(schema: Json) -> SamplingParams:
        return SamplingParams(tool_grammar=tool_call_grammar({"f": schema}, BARE, builtin_tokenizer))

    for schema in ({}, {"anyOf": [{"type": "object"}, {"type": "null"}]}, {"$ref": "#/$defs/o", "$defs": {"o": {}}}):
        for text, fits in (('{"name": "f", "arguments": {', True), ('{"name": "f", "arguments": 5', False)):
            matcher, allowed = compiler.compile(calls(schema)), True
            for token_id in builtin_tokenizer.encode(text, add_special_tokens=False):
                allowed = allowed and bool(matcher.mask()[token_id >> 3] >> (token_id & 7) & 1)
                if allowed:
                    matcher.advance(token_id)
            assert allowed is fits
    with pytest.raises(ValueError, match=r"^tools cannot be followed"):
        compiler.check(calls({"anyOf": [{"type": "string"}, {"type": "null"}]}))
