"""Finds out how a model writes calls and thoughts: its chat template is rendered with probes, and what it writes for a
call is compared with what every notation would write. What no notation writes is derived, where that can be done, or
not known. Never a guess: a notation that a template does not show would turn calls into text.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from mini_sglang.errors import FieldError
from mini_sglang.text.notation import Notation, Thoughts
from mini_sglang.text.notations import HERMES, NOTATIONS, THOUGHTS

Json = dict[str, Any]
_QUESTION = {"role": "user", "content": "Which is the question?"}
_RESULT = "It is the result."
_NAME = "probe_function"
_ARGUMENTS = {"first": 5, "second": "two words"}
_TEXT_ARGUMENTS = '{"first": 5, "second": "two words"}'
_IDS = ("probe0id9", f"functions.{_NAME}:0")  # as Mistral's templates demand, and as Kimi's models write
_TOOL = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "A probe.",
        "parameters": {
            "type": "object",
            "properties": {
                "first": {"type": "integer", "description": "A number."},
                "second": {"type": "string", "description": "A text."},
            },
            "required": ["first", "second"],
        },
    },
}
# Marks around a call: in brackets, and, after it, only such as close something.
_BEFORE = re.compile(r"(?:<[^<>\s]+[>=:]|\[[A-Z_]+\])\s*$")
_AFTER = re.compile(r"\s*(?:</[^<>\s]+>|<[^<>\s]*(?:end|END|close)[^<>\s]*>|\[/[A-Z_]+\])")


class Renders(Protocol):
    """What is needed of a tokenizer."""

    @property
    def chat_template(self) -> str: ...

    def render_chat_template(self, messages: Sequence[Json], /, **arguments: Any) -> str: ...


@dataclass(frozen=True)
class TemplateFormat:
    """What a chat template shows of its model. `notation` is None where it shows one that is not known."""

    notation: Notation | None
    thoughts: Thoughts | None
    writes_tools: bool = True  # into the prompt, itself
    writes_calls: bool = True
    writes_results: bool = True
    text_arguments: bool = False  # it wants the arguments of calls as JSON text


@functools.lru_cache(4)  # a template is rendered several times, and stays the same
def format_of(tokenizer: Renders) -> TemplateFormat:
    """How the model writes, as its chat template shows.

    A model whose template knows neither tools nor calls is told of HERMES in words (text/tool_prompt.py).
    """
    template = tokenizer.chat_template
    thoughts = next((thoughts for thoughts in THOUGHTS if any(text in template for text in thoughts.shown)), None)
    writes_tools = re.search(r"\btools\b", template) is not None
    knows_results = writes_tools or re.search(r"""["']tool["']""", template) is not None
    begins = _rendered(tokenizer, [_QUESTION])
    for prompt, text_arguments in _prompts_with_a_call(tokenizer):
        if notation := _shown_in(prompt, begins) or _derived(prompt.removeprefix(begins)):
            return TemplateFormat(
                notation, thoughts, writes_tools, True, knows_results and _RESULT in prompt, text_arguments
            )
    notation = next((notation for notation in NOTATIONS if any(text in template for text in notation.shown)), None)
    if notation is None and not writes_tools:
        notation = HERMES
    answer = {"role": "assistant", "content": "Answer"}
    writes_results = knows_results and _RESULT in _rendered(tokenizer, [_QUESTION, answer, _result(_IDS[0])])
    return TemplateFormat(notation, thoughts, writes_tools, False, writes_results)


def _shown_in(prompt: str, begins: str) -> Notation | None:
    """The notation in which a prompt has the call of the probe. `begins`: what answers begin with."""
    call = {"name": _NAME, "arguments": _ARGUMENTS, "id": _IDS[0]}
    for squeezed in (str, _squeezed):  # white space tells some notations apart
        shown = squeezed(prompt)
        for notation in NOTATIONS:
            written = squeezed(notation.write([call]))
            if shown.removeprefix(squeezed(begins)).startswith(written) if notation.leading else written in shown:
                return notation
    for notation in NOTATIONS:  # in another way that models write in this notation
        match = notation.first.search(prompt)
        if match and match.groupdict().get("name") == _NAME and prompt[match.end() :].startswith(_TEXT_ARGUMENTS):
            return notation
    return None


def _prompts_with_a_call(tokenizer: Renders) -> Iterator[tuple[str, bool]]:
    """What follows the question in a conversation with a call, in the ways that templates take it: with the arguments
    as an object, and as text."""
    for arguments, call_id in itertools.product((_ARGUMENTS, _TEXT_ARGUMENTS), _IDS):
        call = {"id": call_id, "type": "function", "function": {"name": _NAME, "arguments": arguments}}
        answer = {"role": "assistant", "content": "", "tool_calls": [call]}
        prompt = _rendered(tokenizer, [_QUESTION, answer, _result(call_id)])
        # some write the id last, where it says nothing of the notation
        yield prompt.replace(f', "id": "{call_id}"', ""), arguments is _TEXT_ARGUMENTS


def _result(call_id: str) -> Json:
    return {"role": "tool", "content": _RESULT, "name": _NAME, "tool_call_id": call_id}


def _rendered(tokenizer: Renders, messages: Sequence[Json]) -> str:
    """What follows the question in the prompt; empty if the template does not take these messages."""
    try:
        prompt = tokenizer.render_chat_template(messages, tools=[_TOOL])
    except FieldError:
        return ""
    return prompt.partition(_QUESTION["content"])[2]


def _derived(prompt: str) -> Notation | None:
    """A notation with marks of its own around the name and the arguments, both in JSON or one after the other."""
    arguments = re.escape(_TEXT_ARGUMENTS)
    whole = re.search(rf'\{{"name": "{_NAME}", "(?P<key>arguments|parameters)": {arguments}\}}', prompt)
    named = re.search(rf"{_NAME}(?P<between>\s*(?:[^\w\s{{}}]\S{{0,63}}\s*)?){arguments}", prompt)
    found = whole or named
    if found is None:
        return None
    before, after = _BEFORE.search(prompt, 0, found.start()), _AFTER.match(prompt, found.end())
    if before is None:
        return None
    slots = "{object}" if whole else f"{{name}}{found['between']}{{arguments}}"
    call = f"{before.group()}{slots}{after.group() if after else ''}"
    return Notation(("derived",), call, separator="\n", keys=("name", whole["key"]) if whole else None)


def _squeezed(text: str) -> str:
    return re.sub(r"\s+", "", text).replace("'", '"')
