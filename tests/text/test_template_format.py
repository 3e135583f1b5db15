"""How a model writes calls is found in its chat template, or it is not known: never guessed."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from mini_sglang.server.answers.deltas import Answer
from mini_sglang.server.answers.reader import AnswerReader
from mini_sglang.text.notations import GLM45, HERMES, LLAMA3, PYTHONIC
from mini_sglang.text.template_format import TemplateFormat, format_of
from mini_sglang.text.tokenizer import Tokenizer
from tests.tiny import with_template

FORM = Callable[[str], TemplateFormat]
CALLED = [("f", {"a": [1, "x y"]}), ("g", {})]


@pytest.fixture
def form(builtin_tokenizer: Tokenizer) -> FORM:
    """`form(call)` → what a template shows that writes a call like this, of `name` and `arguments`."""

    def form(call: str) -> TemplateFormat:
        source = (
            "{{ tools or '' }}{% for message in messages %}<|{{ message.role }}|>\n{{ message.content }}"
            "{% for call in message.tool_calls or [] %}{% set name = call.function.name %}"
            f"{{% set arguments = call.function.arguments %}}{call}{{% endfor %}}<|end|>\n{{% endfor %}}"
            "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
        )
        return format_of(with_template(builtin_tokenizer, source))

    return form


def written(text: str, name: str, arguments: object) -> str:
    return text.replace("{{ name }}", name).replace("{{ arguments | tojson }}", json.dumps(arguments))


@pytest.mark.parametrize(
    "call",
    [
        '<my_call>{"name": "{{ name }}", "arguments": {{ arguments | tojson }}}</my_call>',
        '[CALL] {"name": "{{ name }}", "parameters": {{ arguments | tojson }}} [/CALL]',
        "<|fn|>{{ name }}<|args|>{{ arguments | tojson }}<|fn_end|>",
        "<use={{ name }}>{{ arguments | tojson }}</use>",
        "<call:{{ name }}\n{{ arguments | tojson }}",
    ],
)
def test_a_notation_that_nobody_has_named_is_derived(form: FORM, call: str) -> None:
    notation = form(call).notation
    assert notation is not None
    assert notation.names == ("derived",)
    reader = AnswerReader(None, notation, {"f": None, "g": None})
    text = "Let me see. " + "\n".join(written(call, *each) for each in CALLED)
    answer = Answer.of(reader.push(text, final=True))
    assert [(made.name, json.loads(made.text)) for made in answer.calls] == CALLED
    assert answer.content == "Let me see."


@pytest.mark.parametrize(
    "call",
    [
        "I call {{ name }} with {{ arguments | tojson }}",
        'Call: {"name": "{{ name }}", "parameters": {{ arguments | tojson }}}',  # it is not how the answer begins
        "<xml><fn>{{ name }}</fn>{% for key in arguments %}<k>{{ key }}</k>{% endfor %}</xml>",
        "{{ name }}",
    ],
)
def test_what_shows_no_notation_is_not_known(form: FORM, call: str) -> None:
    assert form(call).notation is None


def test_calls_without_marks_are_known_where_an_answer_begins_with_them(form: FORM) -> None:
    assert form('{"name": "{{ name }}", "parameters": {{ arguments | tojson }}}').notation == LLAMA3
    python = "[{{ name }}({% for key, value in arguments.items() %}{{ key }}={{ value | tojson }}"
    assert form(python + "{{ ', ' if not loop.last }}{% endfor %})]").notation == PYTHONIC


def test_the_template_is_asked_before_the_texts_in_it(form: FORM) -> None:
    """One that mentions another notation is not taken for it."""
    glm = "{% for k, v in arguments.items() %}<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v }}</arg_value>\n{% endfor %}"
    source = "{# <|python_tag|> [TOOL_CALLS] #}<tool_call>{{ name }}\n" + glm + "</tool_call>"
    assert form(source).notation == GLM45


def test_results_are_for_the_template_if_it_knows_them(form: FORM) -> None:
    shown = form('<tool_call>\n{"name": "{{ name }}", "arguments": {{ arguments | tojson }}}\n</tool_call>')
    assert shown.notation == HERMES
    assert shown.writes_tools
    assert shown.writes_calls
    assert shown.writes_results
