"""Chats for Mistral's third format hold JSON where its templates paste text, and keep their system message."""

from __future__ import annotations

import pytest

from mini_sglang.sampling_params import Json
from mini_sglang.text.mistral_chats import is_third_format, third_format_messages, third_format_tools

SYSTEM: Json = {"role": "system", "content": "Be brief."}
QUESTION: Json = {"role": "user", "content": "Weather?"}
CALL: Json = {"role": "assistant", "content": "", "tool_calls": [{"id": "abcdefghi"}]}


def result(text: str) -> Json:
    return {"role": "tool", "content": text, "tool_call_id": "abcdefghi"}


def test_the_format_is_known_by_the_results_that_its_templates_paste() -> None:
    assert is_third_format("""{{- '[TOOL_RESULTS]{"content": ' + content|string + ", " }}""")
    assert not is_third_format("{{- '[TOOL_RESULTS]' + content|string + '[/TOOL_RESULTS]' }}")


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
def test_results_are_json(text: str, expected: str) -> None:
    assert third_format_messages([QUESTION, CALL, result(text)]) == [
        QUESTION,
        CALL,
        {**result(""), "content": expected},
    ]


def test_the_system_message_is_part_of_the_last_question_also_when_a_result_comes_last() -> None:
    chat = [SYSTEM, {**QUESTION, "content": "Hi"}, {"role": "assistant", "content": "Hello"}, QUESTION, CALL]
    made = third_format_messages(chat)
    assert [message["role"] for message in made] == ["user", "assistant", "user", "assistant"]
    assert [message["content"] for message in made] == ["Hi", "Hello", "Be brief.\n\nWeather?", ""]
    assert chat[3] == QUESTION


def test_without_a_question_the_system_message_stays_where_it_is() -> None:
    assert third_format_messages([SYSTEM]) == [SYSTEM]


def test_names_and_descriptions_of_tools_are_spelled_as_in_json() -> None:
    parameters = {"type": "object", "description": 'a "b"'}
    function = {"name": "f", "description": 'Says "ü".\n', "parameters": parameters}
    [tool] = third_format_tools([{"type": "function", "function": function}])
    assert tool["function"] == {"name": "f", "description": r"Says \"ü\".\n", "parameters": parameters}
