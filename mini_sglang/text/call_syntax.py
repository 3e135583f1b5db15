"""How models write tool calls: the notations that they were trained on, and which of them a chat template shows.

What is said here goes into prompts and grammars. How calls are found in an answer is server/answers/tool_calls.py's.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class CallSyntax:
    """How a model writes calls: begin, then call_begin {"name": …, arguments_key: {…}} call_end for each, then end."""

    call_begin: str = ""
    call_end: str = ""
    arguments_key: str = "arguments"
    separator: str = ""  # between two calls
    begin: str = ""
    end: str = ""


HERMES = CallSyntax(call_begin="<tool_call>\n", call_end="\n</tool_call>", separator="\n")
LLAMA3 = CallSyntax(separator="; ", arguments_key="parameters")
MISTRAL = CallSyntax(begin="[TOOL_CALLS][", separator=", ", end="]")


def knows_tools(template: str) -> bool:
    """Whether a chat template writes tools into the prompt itself."""
    return re.search(r"\btools\b", template) is not None


def syntax_of(template: str) -> CallSyntax | None:
    """The syntax that a chat template shows; None if it shows one that is not known here."""
    if "[TOOL_CALLS]" in template:
        return MISTRAL
    if "<tool_call>" in template:  # some models write no JSON in it
        return None if "<function=" in template or "<arg_key>" in template else HERMES
    if "<|python_tag|>" in template or '"parameters": dictionary' in template:
        return LLAMA3
    return None if knows_tools(template) else HERMES  # `with_plain_tools` tells the model of it
