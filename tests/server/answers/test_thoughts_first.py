"""Calls that must be made by a model that may think first: what the grammar allows, and how it ends near the limit."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import pytest

from mini_sglang.grammar.compiler import GrammarCompiler, Vocabulary
from mini_sglang.sampling_params import SamplingParams
from mini_sglang.server.answers.deltas import Answer
from mini_sglang.server.answers.model_format import AnswerRules, ModelFormat
from mini_sglang.server.chat import Message, TemplateBody
from mini_sglang.server.config import ServerConfig
from mini_sglang.text.notations import REASONING_PARSERS, TOOL_CALL_PARSERS
from mini_sglang.text.tokenizer import Tokenizer
from tests.server.answers.test_forced_calls import with_marks

PARAMETERS = {"type": "object", "properties": {"zone": {"type": "string"}}, "required": ["zone"]}
GET_TIME: Any = {"type": "function", "function": {"name": "get_time", "parameters": PARAMETERS}}
ADD: Any = {"type": "function", "function": {"name": "add"}}
QUESTION = [Message(role="user", content="What time is it?")]
LIMA = {"name": "get_time", "arguments": {"zone": "Lima"}}
# Parser of calls, parser of thoughts, what the prompt ends with.
FAMILIES = {
    "hermes": ("hermes", "think", "<|im_start|>assistant\n"),
    "qwen3_coder": ("qwen3_coder", "think", "<|im_start|>assistant\n"),
    "harmony": ("openai", "openai_gptoss", "<|start|>assistant"),
    "gemma4": ("gemma4", "gemma4", "<|turn>model\n"),
    "muse": ("muse", "muse", "<|start|>assistant"),
    "solar": ("solar_open", "solar_open", "<|begin|>assistant"),
}


class Model:
    """A family's marks on the built-in vocabulary: as special tokens, or as plain text."""

    def __init__(self, family: str, tokenizer: Tokenizer, *, special: bool) -> None:
        calls, reasoning, self.prompt = FAMILIES[family]
        self.notation, self.thoughts = TOOL_CALL_PARSERS[calls], REASONING_PARSERS[reasoning]
        marks = (*self.notation.markers, *self.thoughts.markers)
        self.tokenizer = with_marks(tokenizer, marks) if special else tokenizer
        vocabulary = Vocabulary.of(self.tokenizer, self.tokenizer.vocab_size, self.tokenizer.eos_token_ids)
        self.compiler = GrammarCompiler(vocabulary, self.tokenizer.encode)
        self._format = ModelFormat.of(self.tokenizer, ServerConfig(tool_call_parser=calls, reasoning_parser=reasoning))

    def rules(self, prompt: str | None = None, **fields: Any) -> AnswerRules:
        body = TemplateBody(tools=[GET_TIME, ADD], **{"tool_choice": "required", **fields})
        return self._format.rules(body, QUESTION, self.tokenizer.encode(self.prompt if prompt is None else prompt))

    def fits(self, text: str, *, prompt: str | None = None, **fields: Any) -> bool:
        """Whether an answer may be this text and nothing else."""
        matcher = self.compiler.compile(self.rules(prompt, **fields).constrain(SamplingParams()))
        for token_id in self.tokenizer.encode(text):
            if matcher.is_finished or not matcher.mask()[token_id // 8] >> token_id % 8 & 1:
                return False
            matcher.advance(token_id)
        end = min(self.tokenizer.eos_token_ids)
        return matcher.is_finished or bool(matcher.mask()[end // 8] >> end % 8 & 1)

    def thought(self, text: str) -> str:
        """A thought at the beginning of an answer, and what begins the message after it."""
        opening = self.thoughts.opening.removeprefix(self.prompt)
        after = "" if self.calls(LIMA).startswith(self.thoughts.forced) else self.thoughts.forced
        return f"{opening}{text}{self.thoughts.closings[0]}{after}"

    def calls(self, *calls: dict[str, Any]) -> str:
        return self.notation.write([{"id": "a1b2c3d4e", **call} for call in calls])


@pytest.fixture(scope="module", params=["special tokens", "plain text"])
def is_special(request: pytest.FixtureRequest) -> bool:
    return bool(request.param == "special tokens")


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, builtin_tokenizer: Tokenizer, is_special: bool) -> Model:
    return Model(request.param, builtin_tokenizer, special=is_special)


def test_a_model_may_think_and_must_then_call(model: Model) -> None:
    called = model.calls(LIMA)
    assert model.fits(model.thought("I need the time.") + called)
    assert model.fits(model.thought("I need\n\nthe time: 1 < 2, {}.") + called)
    assert model.fits(model.thought("") + called)
    assert model.fits(called.removeprefix(model.prompt))
    assert not model.fits(model.thought("I need the time."))
    assert not model.fits(model.thought("I need the time.") + "It is late.")
    assert not model.fits("It is late.")
    assert not model.fits(model.thought("I need the time.") + model.calls({**LIMA, "name": "launch"}))
    assert not model.fits(model.thought("I need the time.") + called.replace("zone", "place"))


def test_after_thoughts_several_calls_only_in_parallel(model: Model) -> None:
    both = model.thought("Two.") + model.calls(LIMA, {"name": "add", "arguments": {}})
    assert model.fits(both)
    assert not model.fits(both, parallel_tool_calls=False)


def test_after_thoughts_the_named_function_is_called(model: Model) -> None:
    named: Any = {"tool_choice": {"type": "function", "function": {"name": "get_time"}}}
    assert model.fits(model.thought("Hm.") + model.calls(LIMA), **named)
    assert not model.fits(model.thought("Hm.") + model.calls({"name": "add", "arguments": {}}), **named)


def test_a_prompt_that_has_closed_the_thoughts_lets_none_come(model: Model) -> None:
    closed = f"{model.prompt}{model.thought('').removesuffix(model.thoughts.forced)}"
    thought = model.thought("Hm.")
    assert not model.fits(thought + model.calls(LIMA), prompt=closed)
    assert model.fits(model.calls(LIMA), prompt=closed)


def test_what_the_grammar_allows_is_read_as_thoughts_and_calls(model: Model) -> None:
    text = model.thought("I need the time.") + model.calls(LIMA)
    for parts in ([text], text):
        reader = model.rules()._reader(eager=True)
        deltas = [delta for part in parts for delta in reader.push(part)]
        answer = Answer.of([*deltas, *reader.push("", final=True)])
        assert [block.kind for block in answer.blocks] == ["reasoning", "call"]
        assert answer.reasoning == "I need the time."
        assert json.loads(answer.calls[0].text) == {"zone": "Lima"}


class Dreamer:
    """A model that goes on with letters and never closes anything of its own will, after a beginning."""

    def __init__(self, model: Model, limit: int) -> None:
        self._model = model
        self._limit = limit
        vocabulary = range(model.tokenizer.vocab_size)
        texts = {i: model.tokenizer.token_bytes(i) for i in vocabulary if i not in model.tokenizer.special_token_ids}
        self._letters = [i for i, text in texts.items() if text.isalpha()]

    def answer(self, begun: str, seed: int = 0) -> str:
        model, rng = self._model, Random(seed)
        matcher = model.compiler.compile(model.rules().constrain(SamplingParams()), self._limit)
        ids: list[int] = []
        for token_id in model.tokenizer.encode(begun):
            matcher.advance(token_id)
            ids.append(token_id)
        while not matcher.is_finished:
            assert len(ids) < self._limit
            mask = int.from_bytes(matcher.mask(), "little")
            letter = rng.choice(self._letters)
            ids.append(letter if mask >> letter & 1 else (mask & -mask).bit_length() - 1)
            if ids[-1] in model.tokenizer.eos_token_ids:
                ids.pop()
                break
            matcher.advance(ids[-1])
        return model.tokenizer.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("limit", [100, 130, 160])
def test_a_thought_without_end_is_closed_and_the_call_made_before_the_limit(model: Model, limit: int) -> None:
    begun = model.thoughts.opening.removeprefix(model.prompt)
    text = Dreamer(model, limit).answer(begun)
    reader = model.rules()._reader(eager=False)
    answer = Answer.of([*reader.push(text), *reader.push("", final=True)])
    assert answer.reasoning, text
    assert answer.calls, text
    assert not answer.content.strip(), text
    arguments = json.loads(answer.calls[0].text)
    assert arguments == {} if answer.calls[0].name == "add" else isinstance(arguments["zone"], str)
