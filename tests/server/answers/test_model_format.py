"""What a request asks of tools, as the grammar that its answers are held to, and who reads what such an answer says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from mini_sglang.errors import FieldError
from mini_sglang.grammar.compiler import GrammarCompiler, Vocabulary
from mini_sglang.outputs import TokenOutput
from mini_sglang.sampling_params import MAX_GRAMMAR_LENGTH, SamplingParams
from mini_sglang.server.answers.model_format import AnswerParser, ModelFormat
from mini_sglang.server.answers.reader import AnswerReader
from mini_sglang.server.chat import Message, TemplateBody
from mini_sglang.server.config import ServerConfig
from mini_sglang.text.notations import REASONING_PARSERS, THINK, TOOL_CALL_PARSERS
from mini_sglang.text.output_processor import OutputProcessor
from mini_sglang.text.tokenizer import Tokenizer

PARAMETERS = {"type": "object", "properties": {"zone": {"type": "string"}}, "required": ["zone"]}
GET_TIME: Any = {"type": "function", "function": {"name": "get_time", "parameters": PARAMETERS}}
ADD: Any = {"type": "function", "function": {"name": "add"}}
STRICT: Any = {"type": "function", "function": {**GET_TIME["function"], "strict": True}}
QUESTION = [Message(role="user", content="What time is it?")]

HERMES_TIME = '<tool_call>\n{"name": "get_time", "arguments": {"zone": "Lima"}}\n</tool_call>'
HERMES_ADD = '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'
LLAMA_TIME = '{"name": "get_time", "parameters": {"zone": "Lima"}}'
MISTRAL_TIME = '[TOOL_CALLS][{"name": "get_time", "arguments": {"zone": "Lima"}}]'

Fits = Callable[..., bool]


@pytest.fixture(scope="module")
def compiler(builtin_tokenizer: Tokenizer) -> GrammarCompiler:
    vocabulary = Vocabulary.of(builtin_tokenizer, builtin_tokenizer.vocab_size, builtin_tokenizer.eos_token_ids)
    return GrammarCompiler(vocabulary, builtin_tokenizer.encode)


@pytest.fixture
def fits(compiler: GrammarCompiler, builtin_tokenizer: Tokenizer) -> Fits:
    """`fits(text, parser, **fields of the body)` → whether an answer may be this text and nothing else."""

    def fits(
        text: str,
        parser: str = "hermes",
        *,
        prompt: str = "",
        reasoning: str = "none",
        form: SamplingParams | None = None,
        **fields: Any,
    ) -> bool:
        config = ServerConfig(tool_call_parser=parser, reasoning_parser=reasoning)
        rules = ModelFormat.of(builtin_tokenizer, config).rules(
            TemplateBody(**fields), QUESTION, builtin_tokenizer.encode(prompt)
        )
        params = rules.constrain(form or SamplingParams())
        params.validate(builtin_tokenizer.vocab_size)
        if not params.is_constrained:
            return True
        matcher = compiler.compile(params)
        for token_id in builtin_tokenizer.encode(text):
            if matcher.is_finished or not matcher.mask()[token_id // 8] >> token_id % 8 & 1:
                return False
            matcher.advance(token_id)
        end = min(builtin_tokenizer.eos_token_ids)
        return matcher.is_finished or bool(matcher.mask()[end // 8] >> end % 8 & 1)

    return fits


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


@pytest.mark.parametrize(
    ("parser", "text"), [("hermes", HERMES_TIME), ("llama3", LLAMA_TIME), ("mistral", MISTRAL_TIME)]
)
def test_required_means_a_call_in_the_models_notation(fits: Fits, parser: str, text: str) -> None:
    fields = {"tools": [GET_TIME, ADD], "tool_choice": "required"}
    assert fits(text, parser, **fields)
    assert not fits("It is late.", parser, **fields)
    assert not fits("", parser, **fields)
    assert not fits(text.replace('"Lima"', "5"), parser, **fields)
    assert not fits(text.replace("zone", "place"), parser, **fields)
    assert not fits(text.replace("get_time", "launch"), parser, **fields)


def test_a_named_function_is_the_one_that_is_called(fits: Fits) -> None:
    fields = {"tools": [GET_TIME, ADD], "tool_choice": named("add")}
    assert fits(HERMES_ADD, **fields)
    assert not fits(HERMES_TIME, **fields)


def test_several_calls_only_in_parallel(fits: Fits) -> None:
    fields: dict[str, Any] = {"tools": [GET_TIME, ADD], "tool_choice": "required"}
    assert fits(f"{HERMES_TIME}\n{HERMES_ADD}", **fields)
    assert not fits(f"{HERMES_TIME}\n{HERMES_ADD}", **fields, parallel_tool_calls=False)
    assert fits(HERMES_TIME, **fields, parallel_tool_calls=False)


def test_a_function_without_parameters_takes_none(fits: Fits) -> None:
    fields = {"tools": [ADD], "tool_choice": "required"}
    assert fits(HERMES_ADD, **fields)
    assert not fits(HERMES_ADD.replace("{}", '{"a": 1}'), **fields)


@pytest.mark.parametrize("parser", ["hermes", "mistral"])
def test_strict_calls_among_free_text(fits: Fits, parser: str) -> None:
    call = HERMES_TIME if parser == "hermes" else MISTRAL_TIME
    fields = {"tools": [STRICT, ADD]}
    assert fits("It is late.", parser, **fields)
    assert fits(call, parser, **fields)
    assert fits(f"Let me see.\n{call}", parser, **fields)
    assert not fits(call.replace('"Lima"', "5"), parser, **fields)
    assert fits(call.replace('"Lima"', "5"), parser, tools=[GET_TIME, ADD])
    strict_add = {"type": "function", "function": {"name": "add", "strict": True}}
    assert fits(call.replace('"Lima"', "5"), parser, tools=[GET_TIME, strict_add])  # each as it asks


def test_reasoning_that_the_prompt_has_opened_comes_before_the_call(fits: Fits) -> None:
    fields = {"tools": [GET_TIME], "tool_choice": "required", "reasoning": "think", "prompt": "assistant\n<think>\n"}
    assert fits(f"I need the time.</think>\n\n{HERMES_TIME}", **fields)
    assert not fits("I need the time.</think>\n\nIt is late.", **fields)
    assert fits(HERMES_TIME, **{**fields, "prompt": "assistant\n<think>\n\n</think>\n\n"})


def test_every_parser_can_be_named_by_its_option() -> None:
    for name in TOOL_CALL_PARSERS:
        ServerConfig(tool_call_parser=name)
    for name in REASONING_PARSERS:
        ServerConfig(reasoning_parser=name)
    with pytest.raises(ValueError, match=r"tool_call_parser must be one of auto, none, hermes"):
        ServerConfig(tool_call_parser="xml")


def test_with_a_form_for_the_answer_too_the_model_calls_or_answers_in_that_form(
    builtin_tokenizer: Tokenizer, fits: Fits
) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    typed = {"type": "json_schema", "json_schema": {"schema": schema}}
    for form, text in (
        ({"regex": "a+"}, "aaa"),
        ({"response_format": typed}, '{"n": 5}'),
        ({"choice": ["a\n"]}, "a\n"),
    ):
        for tool in (GET_TIME, STRICT):
            both = {"tools": [tool], "form": SamplingParams(**form)}
            assert fits(HERMES_TIME, **both)
            assert fits(text, **both)
            assert not fits("What else?", **both)
            assert not fits(f"{text}{HERMES_TIME}", **both)
            assert fits(HERMES_TIME, **both, tool_choice="required")
            assert not fits(text, **both, tool_choice="required")
            assert not fits(HERMES_TIME, **both, tool_choice="none")
            assert fits(text, **both, tool_choice="none")


def test_reasoning_tokens_are_counted_while_they_come_and_not_beyond(builtin_tokenizer: Tokenizer) -> None:
    processor = OutputProcessor(builtin_tokenizer, "r", 5, SamplingParams())
    parser = AnswerParser(AnswerReader(THINK, None, {}), AnswerReader(THINK, None, {}))
    counts = []
    for token_id in builtin_tokenizer.encode("<think> one two</think> four five"):
        output = processor.push(TokenOutput(request_id="r", token_ids=[token_id]))
        parser.push(output)
        counts.append(parser.reasoning_tokens(output))
    num_opening, num_all = (len(builtin_tokenizer.encode(text)) for text in ("<think>", "<think> one two</think>"))
    assert counts[num_opening : num_opening + 2] == [num_opening + 1, num_opening + 2]
    assert counts[num_all - 1 :] == [num_all] * 3


def test_tools_too_large_for_a_grammar_are_refused_with_both_sizes(builtin_tokenizer: Tokenizer) -> None:
    large = {"type": "object", "properties": {"a": {"type": "string", "description": "a" * MAX_GRAMMAR_LENGTH}}}
    tools: Any = [{"type": "function", "function": {"name": "add", "parameters": large}}]
    model_format = ModelFormat.of(builtin_tokenizer, ServerConfig())
    rules = model_format.rules(TemplateBody(tools=tools, tool_choice="required"), QUESTION, [])
    with pytest.raises(
        FieldError, match=f"tools may take at most {MAX_GRAMMAR_LENGTH} bytes as JSON, got 262[0-9]{{3}}"
    ):
        rules.constrain(SamplingParams())


def test_tools_without_need_of_a_grammar_have_none(builtin_tokenizer: Tokenizer) -> None:
    model_format = ModelFormat.of(builtin_tokenizer, ServerConfig())
    for fields in ({}, {"tool_choice": "none"}, {"tool_choice": "auto", "parallel_tool_calls": False}):
        rules = model_format.rules(TemplateBody(tools=[GET_TIME], **fields), QUESTION, [])
        assert not rules.constrain(SamplingParams()).is_constrained


def test_markers_that_are_special_tokens_are_text_where_they_are_looked_for(builtin_tokenizer: Tokenizer) -> None:
    class WithSpecialMarkers(Tokenizer):
        def special_token_id(self, text: str) -> int | None:
            return {"[TOOL_CALLS]": 3, "</think>": 4}.get(text)

    tokenizer = WithSpecialMarkers(
        builtin_tokenizer.backend, builtin_tokenizer.eos_token_ids, lambda: builtin_tokenizer.renderer
    )
    model_format = ModelFormat.of(tokenizer, ServerConfig(tool_call_parser="mistral", reasoning_parser="think"))
    tools = model_format.rules(TemplateBody(tools=[GET_TIME]), QUESTION, [])
    assert tools.constrain(SamplingParams()).shown_special_ids == [3, 4]
    assert model_format.rules(TemplateBody(), QUESTION, []).constrain(SamplingParams()).shown_special_ids == [4]


@pytest.mark.parametrize(
    ("options", "marks"),
    [
        ({"reasoning_parser": "kimi_k3"}, ("<|open|>", "<|sep|>", "<|close|>")),
        ({"reasoning_parser": "solar_open"}, ("<|begin|>", "<|think|>", "<|content|>")),
        ({"reasoning_parser": "openai_gptoss"}, ("<|start|>", "<|channel|>", "<|message|>", "<|end|>")),
        ({"tool_call_parser": "mistral"}, ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")),
    ],
)
def test_a_mark_of_several_special_tokens_is_shown_whole(
    builtin_tokenizer: Tokenizer, options: Any, marks: tuple[str, ...]
) -> None:
    class WithSpecialMarkers(Tokenizer):
        def special_token_id(self, text: str) -> int | None:
            return 3 + marks.index(text) if text in marks else None

    tokenizer = WithSpecialMarkers(
        builtin_tokenizer.backend, builtin_tokenizer.eos_token_ids, lambda: builtin_tokenizer.renderer
    )
    rules = ModelFormat.of(tokenizer, ServerConfig(**options)).rules(TemplateBody(tools=[GET_TIME]), QUESTION, [])
    assert rules.constrain(SamplingParams()).shown_special_ids == list(range(3, 3 + len(marks)))
