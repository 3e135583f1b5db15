"""Which of 70 published chat templates take tools, and that none is taken for something that it is not.

`pytest -s -k published_templates` prints the table.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from mini_sglang.errors import FieldError
from mini_sglang.server.answers.deltas import Answer
from mini_sglang.server.answers.reader import AnswerReader
from mini_sglang.text.template_format import TemplateFormat, format_of
from mini_sglang.text.tokenizer import Tokenizer
from mini_sglang.text.tool_prompt import chat_text
from tests.published.material import templates
from tests.tiny import with_template

FEWEST = 62  # of 70
WRONG = "calls are read as something else"
QUESTION = {"role": "user", "content": "Which is the question?"}
SCHEMAS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "Where."},
            "days": {"type": "integer", "description": "How many."},
            "place": {"type": "object", "description": "Where exactly.", "properties": {"x": {"type": "number"}}},
        },
        "required": ["city"],
    },
    "stop": {"type": "object", "properties": {"now": {"type": "boolean", "description": "Or later."}}},
}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": f"The function {name}.", "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
CALLS: list[dict[str, Any]] = [
    {"name": "get_weather", "arguments": {"city": 'São Paulo, "SP"', "days": 3, "place": {"x": 1.5}}},
    {"name": "stop", "arguments": {"now": True}},
]


@dataclass
class Row:
    name: str
    form: TemplateFormat
    problem: str = ""  # why tools cannot be used


def answer_with(calls: list[dict[str, Any]]) -> dict[str, Any]:
    ids = ("abcdefgh1", "abcdefgh2")
    made = [{"id": i, "type": "function", "function": call} for i, call in zip(ids, calls, strict=False)]
    return {"role": "assistant", "content": "", "tool_calls": made}


def result_of(call_id: str, name: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "name": name, "content": f'{{"result": "of {name}"}}'}


def taken(tokenizer: Tokenizer, form: TemplateFormat, calls: list[dict[str, Any]]) -> bool:
    """Whether a loop of calls and results is in the prompt, and the calls there are read as those calls."""
    results = [result_of("abcdefgh1", "get_weather"), result_of("abcdefgh2", "stop")][: len(calls)]
    messages = [QUESTION, answer_with(calls)]
    loop = chat_text(tokenizer, [*messages, *results], TOOLS, form)
    if not all(name in loop for name in SCHEMAS) or not all(f"of {call['name']}" in loop for call in calls):
        return False
    written = chat_text(tokenizer, messages, TOOLS, form, add_generation_prompt=False)
    prompt = chat_text(tokenizer, messages[:1], TOOLS, form)
    end, text = "", written.rpartition(QUESTION["content"])[2]
    if written.startswith(prompt):
        end, text = form.thoughts.prompt_end(prompt) if form.thoughts is not None else "", written.removeprefix(prompt)
    reader = AnswerReader(form.thoughts, form.notation, SCHEMAS, prompt_end=end)
    answer = Answer.of(reader.push(text, final=True))
    return [(call.name, json.loads(call.text)) for call in answer.calls] == [
        (call["name"], call["arguments"]) for call in calls
    ]


def tried(tokenizer: Tokenizer, name: str) -> Row:
    row = Row(name, format_of(tokenizer))
    if row.form.notation is None:
        row.problem = "how this model writes calls is not known"
        return row
    for calls in (CALLS, CALLS[:1]):  # some templates take one at a time
        try:
            row.problem = "" if taken(tokenizer, row.form, calls) else WRONG
        except FieldError as error:
            row.problem = str(error)
        if not row.problem:
            break
    return row


def test_published_templates_take_tools_or_are_refused_by_name(builtin_tokenizer: Tokenizer) -> None:
    rows = [tried(with_template(builtin_tokenizer, source), name) for name, source in sorted(templates().items())]
    table = Table("template", "calls", "thoughts", "tools")
    for row in rows:
        notation, thoughts = row.form.notation, row.form.thoughts
        table.add_row(
            row.name,
            notation.names[0] if notation is not None else "-",
            thoughts.names[0] if thoughts is not None else "-",
            row.problem or "taken",
        )
    Console(width=160).print(table)
    refused = [row for row in rows if row.problem]
    assert len(rows) == 70
    assert len(rows) - len(refused) >= FEWEST, refused
    assert not [row.name for row in rows if row.problem == WRONG]
    assert all("chat template" in row.problem or "not known" in row.problem for row in refused)
