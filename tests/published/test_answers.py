"""What models of 58 families write, as llama.cpp's tests have it, is read as the message that must come of it.

Whole, one character at a time, in every split into two, and token by token where there is a real tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend

from mini_sglang.errors import FieldError
from mini_sglang.server.answers.deltas import Answer
from mini_sglang.server.answers.reader import AnswerReader
from mini_sglang.text.notation import Thoughts
from mini_sglang.text.template_format import TemplateFormat, format_of
from mini_sglang.text.tokenizer import Tokenizer, load_tokenizer
from mini_sglang.text.tool_prompt import chat_text
from mini_sglang.weights.hub import resolve_model
from tests.published.llama_cpp_cases import Case, Message
from tests.published.material import chat_cases, templates, tokenizer_folder
from tests.tiny import with_template

Read = tuple[str, str, list[tuple[str, Any]]]

# Answers in a form that was asked for: llama.cpp takes Markdown's fence off, which a grammar does not let come here.
FENCED = "```json\n"
# What comes before the thoughts is part of them in llama.cpp, and a mark here.
KEEPS_OPENING = "Apriel-1.6-15b-Thinker-fixed"
REAL_TOKENIZERS = {"Qwen": "qwen3", "deepseek-ai": "deepseek_v3", "meta-llama": "llama3_1", "google-gemma": "gemma3"}


def cases() -> list[Case]:
    try:
        return list(chat_cases().cases)
    except pytest.skip.Exception as reason:
        return [pytest.param(None, marks=pytest.mark.skip(reason=str(reason)))]  # type: ignore[list-item]


@cache
def model(template: str) -> tuple[Tokenizer, TemplateFormat]:
    """The built-in tokenizer with this chat template, and how it shows that its model writes."""
    tokenizer = with_template(load_tokenizer(resolve_model("smollm2-135m")), templates()[template])
    return tokenizer, format_of(tokenizer)


def message(value: Message) -> dict[str, Any]:
    """A message as the template gets it."""
    made: dict[str, Any] = {"role": value.role, "content": value.content}
    if value.reasoning_content:
        made["reasoning_content"] = value.reasoning_content
    if value.tool_call_id:
        made["tool_call_id"] = value.tool_call_id
    if value.tool_calls:
        made["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": json.loads(call.arguments)},
            }
            for call in value.tool_calls
        ]
    return made


def prompt_end(case: Case, thoughts: Thoughts | None) -> str:
    """The mark that the prompt of a case ends with, from which the answer goes on."""
    if thoughts is None:
        return ""
    if case.continue_final_message != "none":
        return thoughts.opening if case.continue_final_message == "reasoning" else ""
    tokenizer, form = model(case.template)
    tools = [{"type": "function", "function": vars(tool)} for tool in case.tools]
    try:
        prompt = chat_text(
            tokenizer,
            [message(each) for each in case.messages],
            tools,
            form,
            add_generation_prompt=case.add_generation_prompt,
            enable_thinking=case.enable_thinking,
            thinking=case.enable_thinking,
        )
    except FieldError:  # a template that renders in llama.cpp alone: its models begin with thoughts
        return thoughts.forced or thoughts.opening
    return thoughts.prompt_end(prompt)


def reader(case: Case, *, eager: bool) -> AnswerReader:
    _, form = model(case.template)
    thoughts = form.thoughts
    end = prompt_end(case, thoughts)
    is_open = thoughts is not None and thoughts.opening.strip() == end != ""
    if case.reasoning_format == "none" and is_open and thoughts and not any(c in case.input for c in thoughts.closings):
        thoughts, end = None, ""  # what the prompt has opened is not told apart
    tools = {tool.name: tool.parameters for tool in case.tools}
    return AnswerReader(thoughts, form.notation if tools else None, tools, prompt_end=end, eager=eager)


def read(case: Case, parts: Iterable[str], *, eager: bool = True) -> Read:
    """What is read from the parts of an answer; the arguments of calls that are not whole are None."""
    machine = reader(case, eager=eager)
    deltas = [delta for part in parts for delta in machine.push(part)]
    if not (case.is_partial and eager):
        deltas += machine.push("", final=True)
    answer = Answer.of(deltas)
    begun = case.messages[-1] if case.continue_final_message != "none" else Message()
    thought = begun.reasoning_content if case.expect.reasoning_content else ""
    joined = thought + (" " if thought and answer.reasoning else "") + answer.reasoning
    calls = [(call.name, whole_json(call.text)) for call in answer.calls]
    return (begun.content + answer.content).strip(), joined.strip(), calls


def whole_json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def expected(case: Case) -> Read:
    calls = [(call.name, whole_json(call.arguments)) for call in case.expect.tool_calls]
    reasoning = case.expect.reasoning_content
    if case.template == KEEPS_OPENING and case.continue_final_message == "none":
        reasoning = reasoning.removeprefix("Here are my reasoning steps:\n")
    return case.expect.content.strip(), reasoning.strip(), calls


def is_of_another_kind(case: Case) -> str:
    """Why a case is none of ours; empty if it is one."""
    thoughts = model(case.template)[1].thoughts
    if case.json_schema and FENCED in case.input + "```json\n" * case.input.endswith("\n"):
        return "the form of an answer is held by a grammar"
    marks = (thoughts.opening.strip(), *thoughts.closings) if thoughts is not None and thoughts.opening else ()
    if case.reasoning_format == "none" and any(mark in case.expect.content for mark in marks):
        return "thoughts are left among the text, marks and all"
    return ""


def tokens(case: Case) -> Iterator[str]:
    """The answer in the tokens of a real tokenizer of the family."""
    name = next((name for start, name in REAL_TOKENIZERS.items() if case.template.startswith(start)), "qwen3")
    backend = real_tokenizer(name)
    start = 0
    for _, end in backend.encode(case.input, add_special_tokens=False).offsets:
        if end > start:
            yield case.input[start:end]
            start = end
    yield case.input[start:]


@cache
def real_tokenizer(name: str) -> Backend:
    return Backend.from_file(str(tokenizer_folder(name) / "tokenizer.json"))


@pytest.mark.parametrize("case", cases(), ids=lambda case: f"{case.template}-{case.line}" if case else "none")
def test_an_answer_is_read_as_the_message_that_it_is(case: Case) -> None:
    if reason := is_of_another_kind(case):
        pytest.skip(reason)
    text, message = case.input, expected(case)
    assert read(case, [text]) == message
    assert read(case, text) == message
    if not case.is_partial:
        assert read(case, [text], eager=False) == message
        assert read(case, text, eager=False) == message
    for cut in range(1, len(text)):
        assert read(case, [text[:cut], text[cut:]]) == message, (text[:cut], text[cut:])


@pytest.mark.parametrize("template", sorted({case.template for case in cases() if case}) or ["none"])
def test_answers_are_read_token_by_token(template: str) -> None:
    for case in cases():
        if case.template == template and not is_of_another_kind(case):
            assert read(case, tokens(case)) == expected(case), case.line


@pytest.mark.parametrize("case", cases(), ids=lambda case: f"{case.template}-{case.line}" if case else "none")
def test_an_answer_may_end_anywhere(case: Case) -> None:
    for eager in (True, False):
        for cut in range(len(case.input)):
            machine = reader(case, eager=eager)
            answer = Answer.of([*machine.push(case.input[:cut]), *machine.push("", final=True)])
            assert eager or all(isinstance(whole_json(call.text), dict) for call in answer.calls)
