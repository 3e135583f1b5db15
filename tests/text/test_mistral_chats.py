"""Chats reach Mistral's templates so that these write JSON, the system message and thoughts as its library does."""

from __future__ import annotations

import copy

import pytest

from mini_sglang.sampling_params import Json
from mini_sglang.text.mistral_chats import in_mistral_form

THIRD = """{{- '[TOOL_RESULTS]{"content": ' + content|string + ", " }}"""
LATER = "{{- '[TOOL_RESULTS]' + content|string + '[/TOOL_RESULTS]' }}"
THINKING = "{% if block['type'] == 'thinking' %}{% endif %}"
SYSTEM: Json = {"role": "system", "content": "Be brief."}
QUESTION: Json = {"role": "user", "content": "Weather?"}
CALL: Json = {"role": "assistant", "content": "", "tool_calls": [{"id": "abcdefghi"}]}


def form(template: str, messages: list[Json]) -> list[Json]:
    """The messages as this template takes them."""
    before = copy.deepcopy(messages)
    made, _ = in_mistral_form(template, messages, [])
    assert messages == before
    return list(made)


def result(text: str) -> Json:
    return {"role": "tool", "content": text, "tool_call_id": "abcdefghi"}


@pytest.mark.parametrize("template", [LATER, "{{ messages }}"])
def test_other_templates_take_messages_as_they_are(template: str) -> None:
    chat = [SYSTEM, QUESTION, {**CALL, "reasoning_content": "Why?"}, result("Sunny")]
    assert form(template, chat) == chat


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Sunny", '"Sunny"'),
        ('"Sunny", he said.\n', r'"\"Sunny\", he said.\n"'),
        ('{"a":1,"b":["ü",null]}', '{"a": 1, "b": ["ü", null]}'),
        ("21.5", "21.5"),
        ("", "{}"),
        ("[" * 10_000, '"' + "[" * 10_000 + '"'),
    ],
)
def test_results_that_are_pasted_into_json_are_json(text: str, expected: str) -> None:
    assert form(THIRD, [QUESTION, CALL, result(text)]) == [QUESTION, CALL, result(expected)]


def test_the_system_message_is_part_of_the_last_question_also_when_a_result_comes_last() -> None:
    chat = [SYSTEM, {**QUESTION, "content": "Hi"}, {"role": "assistant", "content": "Hello"}, QUESTION, CALL]
    made = form(THIRD, chat)
    assert [message["role"] for message in made] == ["user", "assistant", "user", "assistant"]
    assert [message["content"] for message in made] == ["Hi", "Hello", "Be brief.\n\nWeather?", ""]
    assert form(THIRD, [SYSTEM]) == [SYSTEM]


def test_descriptions_of_tools_are_spelled_as_in_json() -> None:
    parameters = {"type": "object", "description": 'a "b"'}
    given = {"type": "function", "function": {"name": "f", "description": 'Says "ü".\n', "parameters": parameters}}
    _, [tool] = in_mistral_form(THIRD, [QUESTION], [given])
    assert tool["function"] == {"name": "f", "description": r"Says \"ü\".\n", "parameters": parameters}
    assert in_mistral_form(LATER, [QUESTION], [given])[1] == [given]


def test_thoughts_are_a_part_of_the_content_where_a_template_reads_parts() -> None:
    thinking = {"type": "thinking", "thinking": "Why?"}
    made = form(THINKING, [QUESTION, {**CALL, "content": "So.", "reasoning_content": "Why?"}])
    assert made == [QUESTION, {**CALL, "content": [thinking, {"type": "text", "text": "So."}]}]
    assert form(THINKING, [{**CALL, "reasoning_content": "Why?"}]) == [{**CALL, "content": [thinking]}]
    assert form(THINKING, [SYSTEM, QUESTION, CALL]) == [SYSTEM, QUESTION, CALL]
