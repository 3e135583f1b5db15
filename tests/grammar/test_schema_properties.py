"""Any schema of the supported keywords, before a real engine with random weights: whole answers are valid, none fails.

Hypothesis writes the schemas. An answer that its limit of tokens cuts off says nothing.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from mini_sglang.config import EngineConfig
from mini_sglang.engine import Engine
from mini_sglang.errors import FieldError
from mini_sglang.outputs import FinishReason
from mini_sglang.sampling_params import SamplingParams
from tests.tiny import Checkpoints

NAMES = ("a", "b", "ab", "x-1", 'q"\\', "é")
PATTERNS = ("^[a-c]{1,3}$", "^x", "b$", "a", "^(a|b)$", r"^\d+$", "^é?$")
bounds = st.one_of(
    st.integers(-12, 12),
    st.floats(-3, 3).map(lambda value: round(value, 3)),
    st.sampled_from([0, 0.5, -(2**63), 2**63 - 1, 2**53 + 1, 1e-7, 0.1, 1e18]),
)
counts = st.integers(0, 3)


def some_of(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=fields)


def both(*parts: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    return st.tuples(*parts).map(lambda made: {key: value for part in made for key, value in part.items()})


numbers = both(
    st.fixed_dictionaries({"type": st.sampled_from(["integer", "number", ["integer", "null"]])}),
    some_of(minimum=bounds, maximum=bounds, exclusiveMinimum=bounds, exclusiveMaximum=bounds),
    st.one_of(st.just({}), st.fixed_dictionaries({"multipleOf": st.sampled_from([1, 2, 5, 7, 0.5, 0.25])})),
)
strings = both(
    st.just({"type": "string"}),
    some_of(minLength=counts, maxLength=st.integers(2, 6)),
    st.one_of(st.just({}), st.fixed_dictionaries({"pattern": st.sampled_from(PATTERNS)})),
)
formats = st.fixed_dictionaries(
    {"type": st.just("string"), "format": st.sampled_from(["date", "time", "date-time", "uuid", "ipv4", "ipv6"])}
)
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.text(max_size=4)
    | st.floats(-5, 5).map(lambda x: round(x, 2)),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=2),
    max_leaves=3,
)
leaves = st.one_of(
    numbers,
    strings,
    formats,
    st.sampled_from([{"type": "null"}, {"type": "boolean"}, {"$ref": "#/$defs/leaf"}, True, False]),
    st.fixed_dictionaries({"const": values}),
    st.fixed_dictionaries({"enum": st.lists(values, min_size=1, max_size=3)}),
)


def compound(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    objects = both(
        st.just({"type": "object"}),
        st.fixed_dictionaries({"properties": st.dictionaries(st.sampled_from(NAMES), inner, max_size=3)}),
        some_of(
            required=st.lists(st.sampled_from(NAMES[:3]), unique=True, max_size=2),
            additionalProperties=st.one_of(st.just(False), inner),
            patternProperties=st.dictionaries(st.sampled_from(PATTERNS), inner, max_size=2),
            minProperties=counts,
            maxProperties=counts,
        ),
    )
    arrays = both(
        st.just({"type": "array"}),
        some_of(items=inner, prefixItems=st.lists(inner, min_size=1, max_size=2), minItems=counts, maxItems=counts),
    )
    several = st.lists(inner, min_size=1, max_size=3)
    combined = st.one_of(*(st.fixed_dictionaries({key: several}) for key in ("anyOf", "allOf", "oneOf")))
    return st.one_of(objects, arrays, combined, both(combined, some_of(minimum=bounds, maxLength=st.just(4))))


schemas = st.builds(
    lambda schema, leaf: {"allOf": [schema], "$defs": {"leaf": leaf}},
    st.recursive(leaves, compound, max_leaves=6),
    st.one_of(numbers, strings),
)


@pytest.fixture(scope="module")
def engine(checkpoints: Checkpoints) -> Iterator[Engine]:
    path = str(checkpoints.write().path)
    engine = Engine(EngineConfig(model=path, dtype="float32", num_threads=1, num_pages=64))
    yield engine
    engine.close()


def refused(engine: Engine, params: SamplingParams) -> str:
    """Why a grammar is refused; empty if it is not."""
    try:
        engine.check_grammar(params)
    except FieldError as error:
        return str(error)
    return ""


request_ids = map(str, itertools.count())


@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)
@given(schemas)
def test_whole_answers_are_valid_and_no_answer_fails(
    engine: Engine, tiny_tokenizer: PreTrainedTokenizerFast, schema: Any
) -> None:
    params = [
        SamplingParams(
            response_format={"type": "json_schema", "json_schema": {"schema": schema, "strict": True}},
            max_tokens=120,
            temperature=3,
            seed=seed,
        )
        for seed in range(3)
    ]
    if refusal := refused(engine, params[0]):
        without_names = re.sub('property "[^"]*"', "property", refusal)  # a name may be a pattern, which has braces
        assert re.match("response_format cannot be followed: [^{}]*$", without_names)
        assert refused(engine, params[1]) == refusal
        return
    fits = jsonschema_rs.validator_for(schema, validate_formats=True)
    tokens: dict[str, list[int]] = {}
    for each in params:
        tokens[name := next(request_ids)] = []
        engine.add_request(name, [5, 6, 7], each)
    while engine.has_work:
        for output in engine.step():
            assert output.error is None, (output.error, schema)
            tokens[output.request_id] += output.token_ids
            if output.finish_reason is FinishReason.STOP:
                text = tiny_tokenizer.decode(tokens[output.request_id], skip_special_tokens=True)
                value = json.loads(text)
                assert fits.is_valid(value), (text, schema)
                assert not re.search(r"\d{41}", text), text
