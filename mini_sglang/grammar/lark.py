"""Pieces of Lark grammars, as llguidance takes them: texts, answers that are no JSON, and its errors in words."""

from __future__ import annotations

import json
import re

from llguidance import regex_to_lark
from llguidance.gbnf_to_lark import any_to_lark

from mini_sglang.errors import FieldError, shorten
from mini_sglang.sampling_params import Json, SamplingParams

ANY_TEXT = r"/(.|\n)*/"


def answer_entry(params: SamplingParams) -> Json:
    """The form of an answer that is no call: a grammar, or a schema and whether it is strict. For `_prepared`."""
    if params.response_format is not None:
        named = params.response_format.get("json_schema", {"schema": {"type": "object"}})
        return {"json_schema": named["schema"], "strict": bool(named.get("strict"))}
    if params.regex is not None:
        if len(params.regex) - len(params.regex.rstrip("\\")) & 1:  # it would escape what comes after the pattern
            raise FieldError("regex", "cannot be followed: it ends in a backslash that escapes nothing")
        pattern = regex_to_lark(params.regex, "d")  # \d is 0 to 9, not any digit of Unicode
        return {"lark_grammar": f"start: ANSWER\nANSWER: /{pattern}/"}
    if params.choice is not None:
        return {"lark_grammar": "start: " + " | ".join(map(spelled, params.choice))}
    if params.ebnf is None:
        raise ValueError("the sampling parameters hold no grammar of an answer")
    try:
        return {"lark_grammar": any_to_lark(params.ebnf)}
    except Exception as error:  # the converter raises Exception itself for much of what it does not understand
        raise refusal("ebnf", str(error)) from error


def lark_string(text: str) -> str:
    """As a string of a Lark grammar."""
    return json.dumps(text, ensure_ascii=False)


def spelled(text: str) -> str:
    """Any text, as a regular expression of a Lark grammar: its strings have no escapes for some characters."""
    return lark_string(text) if text.isprintable() else f"/{''.join(map(_escaped, text))}/"


def _escaped(character: str) -> str:
    return character if character.isalnum() else f"\\x{{{ord(character):x}}}"


_TOO_LARGE = re.compile(r"too (many|large|complex)|fuel|limit|items; max|states")
_NOTHING_FITS = re.compile(r"NoExtension|no tokens? (are )?allowed")


def refusal(field: str, reason: str) -> FieldError:
    """llguidance's reason in one line, in words where it is about its own workings."""
    reason = " ".join(reason.replace("<non-verbose/>", "").split())
    if _TOO_LARGE.search(reason) and "regex parse error" not in reason:
        return FieldError(field, "cannot be followed: it makes too large a grammar; make it smaller")
    if _NOTHING_FITS.search(reason):
        return FieldError(field, "cannot be followed: it leads to where nothing fits")
    return FieldError(field, f"cannot be followed: {shorten(reason, 300)[1:-1]}")
