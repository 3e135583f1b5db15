"""The types of fields in requests' bodies, with bounds on what takes time or memory before anything else is checked.

Types are strict ("5" is no integer, true is no number) and null means "not given". A field that an API has and this
server does not is accepted only with the value that switches it off. `SamplingParams.validate` checks ranges.
"""

from __future__ import annotations

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
MAX_TOOLS = 128  # as OpenAI
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


def _join_text_parts(content: Any) -> Any:
    """Message content given as a list of text parts, as the one string that the parts make without separators."""
    if not isinstance(content, list):
        return content
    if len(content) > MAX_MESSAGES:
        raise ValueError(f"may hold at most {MAX_MESSAGES} parts, got {len(content)}")
    texts = []
    for index, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else part
            raise ValueError(
                f'holds a part that is not {{"type": "text", "text": "…"}} at {index}, got type {shorten(kind)}'
            )
        texts.append(part["text"])
    return "".join(texts)


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
Content = Annotated[str, BeforeValidator(_join_text_parts)]
