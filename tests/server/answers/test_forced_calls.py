"""Calls that a grammar holds to a notation, of a model that says anything the grammar allows, are read as calls.

The model here is as random as one can be: each token is drawn from those that the grammar allows. Its vocabulary is the
built-in one with the marks of the notation as special tokens, as models that were trained on it have them.
"""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Iterable
from random import Random
from typing import Any

import jsonschema_rs
import pytest

from mini_sglang.grammar.compiler import GrammarCompiler, Vocabulary
from mini_sglang.sampling_params import SamplingParams
from mini_sglang.server.answers.deltas import Answer
from mini_sglang.server.answers.model_format import AnswerRules, ModelFormat
from mini_sglang.server.chat import Message, TemplateBody
from mini_sglang.server.config import ServerConfig
from mini_sglang.text.notation import Notation
from mini_sglang.text.notations import NOTATIONS, THOUGHTS
from mini_sglang.text.tokenizer import Tokenizer

TRIES = 8
MOST_TOKENS = 120
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "unit": {"enum": ["C", "F"]},
        "exact": {"type": "boolean"},
        "place": {
            "type": "object",
            "properties": {"x": {"type": "number"}, "name": {"type": "string"}},
            "required": ["x"],
            "additionalProperties": False,
        },
        "hours": {"type": "array", "items": {"type": "integer"}},
        "note": {"type": ["string", "null"]},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
EMPTY = {"type": "object", "properties": {}, "additionalProperties": False}
OPTIONAL = {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "boolean"}}}
SCHEMAS: dict[str, dict[str, Any]] = {
    "get_weather": WEATHER,
    "stop": EMPTY,
    "set_options": {**OPTIONAL, "additionalProperties": False},
}
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in SCHEMAS.items()
]
QUESTION = [Message(role="user", content="What will the weather be?")]


def with_marks(tokenizer: Tokenizer, marks: tuple[str, ...]) -> Tokenizer:
    """The same tokenizer with these texts as special tokens."""
    backend = copy.deepcopy(tokenizer.backend)
    backend.add_special_tokens(list(marks))
    return Tokenizer(backend, tokenizer.eos_token_ids, lambda: tokenizer.renderer)


class RandomModel:
    """Draws each token from those that the grammar of a request allows."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        vocabulary = Vocabulary.of(tokenizer, tokenizer.vocab_size, tokenizer.eos_token_ids)
        self._compiler = GrammarCompiler(vocabulary, tokenizer.encode)
        self._tokenizer = tokenizer

    def answer(self, params: SamplingParams, seed: int) -> str:
        rng, ids = Random(seed), list[int]()
        matcher = self._compiler.compile(params, MOST_TOKENS)
        while not matcher.is_finished and len(ids) < MOST_TOKENS:
            mask = int.from_bytes(matcher.mask(), "little")
            allowed = (
                [index for index in range(mask.bit_length()) if mask >> index & 1] if mask.bit_count() < 64 else []
            )
            if not allowed:
                first = rng.randrange(mask.bit_length())
                ahead = mask >> first << first
                allowed = [(ahead & -ahead).bit_length() - 1]
            ids.append(rng.choice(allowed))
            if ids[-1] in self._tokenizer.eos_token_ids:
                break
            matcher.advance(ids[-1])
        keep = set(params.shown_special_ids)
        texts = (
            "" if i in self._tokenizer.special_token_ids and i not in keep else self._tokenizer.token_bytes(i)
            for i in ids
        )
        return b"".join(text if isinstance(text, bytes) else b"" for text in texts).decode(errors="replace")


def read(rules: AnswerRules, text: str, *parts: str) -> Answer:
    reader = rules._reader(eager=True)
    deltas = [delta for part in parts or (text,) for delta in reader.push(part)]
    return Answer.of([*deltas, *reader.push("", final=True)])


@pytest.mark.parametrize("notation", NOTATIONS, ids=lambda notation: notation.names[0])
def test_required_calls_parse(builtin_tokenizer: Tokenizer, notation: Notation) -> None:
    for parallel in (True, False):
        required_calls(builtin_tokenizer, notation, parallel, range(TRIES // 2))


@pytest.mark.parametrize(("name", "seed"), [("deepseek_v32", 1007), ("glm45", 1095), ("kimi_k3", 1098)])
def test_calls_near_the_limit_are_ended(builtin_tokenizer: Tokenizer, name: str, seed: int) -> None:
    """Two begin a long call late, one an optional object."""
    required_calls(builtin_tokenizer, next(n for n in NOTATIONS if name in n.names), True, [seed])


def required_calls(builtin: Tokenizer, notation: Notation, parallel: bool, seeds: Iterable[int]) -> None:
    """Answers in the notation are read as calls of the tools that are offered."""
    thoughts = next((thoughts for thoughts in THOUGHTS if set(thoughts.names) & set(notation.names)), None)
    marks = (*notation.markers, *(thoughts.markers if thoughts is not None else ()))
    tokenizer = with_marks(builtin, marks)
    config = ServerConfig(
        tool_call_parser=notation.names[0], reasoning_parser=thoughts.names[0] if thoughts is not None else "none"
    )
    prompt = tokenizer.encode(thoughts.forced) if thoughts is not None else []
    model = RandomModel(tokenizer)
    body = TemplateBody(tools=TOOLS, tool_choice="required", parallel_tool_calls=parallel)
    rules = ModelFormat.of(tokenizer, config).rules(body, QUESTION, prompt)
    rules = dataclasses.replace(rules, may_think=False)
    params = rules.constrain(SamplingParams())
    for seed in seeds:
        text = model.answer(params, seed)
        answer = read(rules, text)
        assert answer.calls, text
        assert not answer.content.strip(), text
        assert parallel or len(answer.calls) == 1, text
        for call in answer.calls:
            jsonschema_rs.validate(SCHEMAS[call.name], json.loads(call.text))
        again = read(rules, text, *text)
        assert [(call.name, call.text) for call in again.calls] == [(call.name, call.text) for call in answer.calls]
