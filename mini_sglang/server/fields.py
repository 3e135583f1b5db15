"""The types of fields in requests' bodies, with bounds on what takes time or memory before anything else is checked.

Types are strict ("5" is no integer, true is no number) and null means "not given". A field that an API has and this
server does not is accepted only with the value that switches it off. `SamplingParams.validate` checks ranges.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from pydantic import BeforeValidator, Field, JsonValue

from mini_sglang.errors import shorten
from mini_sglang.sampling_params import (
    MAX_GRAMMAR_CHOICES,
    MAX_GRAMMAR_LENGTH,
    MAX_LOGIT_BIASES,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
)

MAX_CHOICES = 128  # of `n`, as OpenAI
MAX_MESSAGES = 100_000  # and parts of one message
MAX_TOOLS = 1024  # coding agents offer those of many MCP servers at once
MAX_CHAT_TOOLS = 128  # of a chat, as OpenAI
MAX_TOKEN_IDS = 1_000_000  # of one list; models have smaller contexts and vocabularies
MAX_LABELS = 16  # of `metadata`, as OpenAI
MAX_TEMPLATE_BYTES = 1 << 16  # of `chat_template_kwargs`, as JSON


def must_be_off(*allowed: JsonValue) -> BeforeValidator:
    """Accept an unsupported field only with a value that switches it off: null, or one of `allowed`."""

    def check(value: JsonValue) -> JsonValue:
        if any(type(value) is type(off) and value == off for off in (None, *allowed)):
            return None
        raise ValueError("is not supported by this server")

    return BeforeValidator(check)


def at_most(limit: int) -> BeforeValidator:
    """Refuse a list or object with more entries, before anything looks at them."""

    def check(value: Any) -> Any:
        if isinstance(value, (list, dict)) and len(value) > limit:
            raise ValueError(f"may hold at most {limit} entries, got {len(value)}")
        return value

    return BeforeValidator(check)


def _check_template_size(value: Any) -> Any:
    size = len(msgspec.json.encode(value))
    if size > MAX_TEMPLATE_BYTES:
        raise ValueError(f"may take at most {MAX_TEMPLATE_BYTES} bytes as JSON, got {size}")
    return value


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def text_parts(*kinds: str) -> BeforeValidator:
    """Take content given as a list of parts of these types as the one string that they make, without separators."""

    def join(content: Any) -> Any:
        if not isinstance(content, list):
            return content
        if len(content) > MAX_MESSAGES:
            raise ValueError(f"may hold at most {MAX_MESSAGES} parts, got {len(content)}")
        texts = []
        for index, part in enumerate(content):
            kind = part.get("type") if isinstance(part, dict) else part
            text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, dict) else None
            if kind not in kinds or not isinstance(text, str):
                expected = f'{{"type": "{kinds[0]}", "text": "…"}}'
                raise ValueError(f"holds a part that is not {expected} at {index}, got type {shorten(kind)}")
            texts.append(text)
        return "".join(texts)

    return BeforeValidator(join)


def kind_of(item: Any) -> str:
    """The type that a client has written into a part of a conversation; empty if there is none."""
    kind = item.get("type") if isinstance(item, dict) else None
    return kind if isinstance(kind, str) else ""


def only_functions(*types: str | None) -> BeforeValidator:
    """Leave out tools of other types than these, which only their vendor runs, while there are any of these types."""

    def select(tools: Any) -> Any:
        if not isinstance(tools, list) or not tools:
            return tools
        is_foreign = [isinstance(tool, dict) and _is_foreign(tool.get("type"), types) for tool in tools]
        if all(is_foreign):
            raise ValueError(f"must hold a function: this server runs no tool of type {shorten(tools[0]['type'])}")
        return [tool for tool, foreign in zip(tools, is_foreign, strict=True) if not foreign]

    return BeforeValidator(select)


def _offered_choice(choice: Any) -> Any:
    kind = choice.get("type") if isinstance(choice, dict) else None
    if isinstance(kind, str) and kind != "function":
        message = 'must be "none", "auto", "required" or a choice of type "function"'
        raise ValueError(f"{message}: this server takes none of type {shorten(kind)}")
    return choice


def _is_foreign(kind: Any, types: Sequence[str | None]) -> bool:
    return isinstance(kind, str) and kind not in types


# Claude Code's first block of the system prompt, for its vendor's books: other text in every request.
_BOOKKEEPING = re.compile(r"x-anthropic-billing-header:(?:[ \t]*[\w-]+=[^;\s]*(?:;|(?=\s|\Z)))+\s*")


def without_bookkeeping(content: Any) -> Any:
    """A system prompt without the vendor's bookkeeping at its head, which would cost the prefix cache all the rest."""
    if isinstance(content, str):
        match = _BOOKKEEPING.match(content)
        return content if match is None else content[match.end() :] or None
    if isinstance(content, list) and content and isinstance(content[0], dict):
        text = content[0].get("text")
        rest = without_bookkeeping(text)
        if rest is not text:
            return ([] if rest is None else [{**content[0], "text": rest}]) + content[1:] or None
    return content


ONLY_FUNCTION_CHOICES = BeforeValidator(_offered_choice)  # of `tool_choice`, in OpenAI's form
Off = Annotated[None, must_be_off()]
OffIfFalse = Annotated[None, must_be_off(False)]
OffIfEmpty = Annotated[None, must_be_off([])]
FAIL_FAST = Field(fail_fast=True)  # one wrong entry is enough, where pydantic would describe them all
StopStrings = Annotated[list[str], FAIL_FAST, at_most(MAX_STOP_STRINGS), BeforeValidator(_as_list)]
StopTokenIds = Annotated[list[int], FAIL_FAST, at_most(MAX_STOP_TOKEN_IDS)]
TokenIds = Annotated[list[int], FAIL_FAST, at_most(MAX_TOKEN_IDS)]
LogitBias = Annotated[dict[str, float], at_most(MAX_LOGIT_BIASES)]
Labels = Annotated[dict[str, str], at_most(MAX_LABELS)]
GrammarText = Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR_LENGTH)]
GrammarChoices = Annotated[list[str], FAIL_FAST, at_most(MAX_GRAMMAR_CHOICES)]
TemplateArguments = Annotated[dict[str, JsonValue], BeforeValidator(_check_template_size)]
Content = Annotated[str, text_parts("text", "refusal")]
Ignored = Any  # changes no answer
