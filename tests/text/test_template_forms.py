"""Chats reach templates of odd forms so that these write JSON, the system message, thoughts and arguments rightly."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
from transformers import PreTrainedTokenizerFast

from mini_sglang.sampling_params import Json
from mini_sglang.text.template_forms import in_template_form
from mini_sglang.text.tokenizer import Tokenizer

PASTING = """{{- '[TOOL_RESULTS]{"content": ' + content|string + ", " }}"""
LATER = "{{- '[TOOL_RESULTS]' + content|string + '[/TOOL_RESULTS]' }}"
THINKING_PARTS = "{% if block['type'] == 'thinking' %}{% endif %}"
TEXT_ARGUMENTS = """\
{% for message in messages %}{% for call in message.tool_calls or [] %}
{{ call.function.name + call.function.arguments }}{% endfor %}{% endfor %}"""
SYSTEM: Json = {"role": "system", "content": "Be brief."}
QUESTION: Json = {"role": "user", "content": "Weather?"}
CALL: Json = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": {"a": "ü"}}}],
}

Form = Callable[[str, list[Json]], list[Json]]


@pytest.fixture
def form(tiny_tokenizer: PreTrainedTokenizerFast) -> Form:
    """`form(template, messages)` → the messages as this template takes them."""

    def form(template: str, messages: list[Json]) -> list[Json]:
        before = copy.deepcopy(messages)
        made, _ = in_template_form(with_template(tiny_tokenizer, template), messages, [])
        assert messages == before
        return list(made)

    return form


def with_template(library: PreTrainedTokenizerFast, template: str) -> Tokenizer:
    changed = copy.copy(library)
    changed.chat_template = template
    return Tokenizer(changed, frozenset())


def result(text: str) -> Json:
    return {"role": "tool", "content": text, "tool_call_id": "abcdefghi"}


@pytest.mark.parametrize("template", [LATER, "{{ messages }}"])
def test_other_templates_take_messages_as_they_are(form: Form, template: str) -> None:
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
def test_results_that_are_pasted_into_json_are_json(form: Form, text: str, expected: str) -> None:
    assert form(PASTING, [QUESTION, CALL, result(text)]) == [QUESTION, CALL, result(expected)]


def test_the_system_message_is_part_of_the_last_question_also_when_a_result_comes_last(form: Form) -> None:
    chat = [SYSTEM, {**QUESTION, "content": "Hi"}, {"role": "assistant", "content": "Hello"}, QUESTION, CALL]
    made = form(PASTING, chat)
    assert [message["role"] for message in made] == ["user", "assistant", "user", "assistant"]
    assert [message["content"] for message in made] == ["Hi", "Hello", "Be brief.\n\nWeather?", ""]
    assert form(PASTING, [SYSTEM]) == [SYSTEM]


def test_descriptions_of_tools_are_spelled_as_in_json(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    parameters = {"type": "object", "description": 'a "b"'}
    given = {"type": "function", "function": {"name": "f", "description": 'Says "ü".\n', "parameters": parameters}}
    _, [tool] = in_template_form(with_template(tiny_tokenizer, PASTING), [QUESTION], [given])
    assert tool["function"] == {"name": "f", "description": r"Says \"ü\".\n", "parameters": parameters}
    assert in_template_form(with_template(tiny_tokenizer, LATER), [QUESTION], [given])[1] == [given]


def test_thoughts_are_a_part_of_the_content_where_a_template_reads_parts(form: Form) -> None:
    thinking = {"type": "thinking", "thinking": "Why?"}
    made = form(THINKING_PARTS, [QUESTION, {**CALL, "content": "So.", "reasoning_content": "Why?"}])
    assert made == [QUESTION, {**CALL, "content": [thinking, {"type": "text", "text": "So."}]}]
    assert form(THINKING_PARTS, [{**CALL, "reasoning_content": "Why?"}]) == [{**CALL, "content": [thinking]}]
    assert form(THINKING_PARTS, [SYSTEM, QUESTION, CALL]) == [SYSTEM, QUESTION, CALL]


def test_arguments_are_text_where_a_template_takes_no_object(form: Form) -> None:
    _, call = form(TEXT_ARGUMENTS, [QUESTION, CALL])
    assert call["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a": "ü"}'}
    assert form("{{ raise_exception('no') }}", [QUESTION, CALL]) == [QUESTION, CALL]
