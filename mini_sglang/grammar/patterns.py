"""Finds what makes a text no regular expression in any dialect: ECMA 262, Java, PCRE, Python and Rust differ in much.

JSON Schema speaks of ECMA 262, and generators write their own language's dialect. What one of them may read is let pass
here. Knows nothing of schemas, nor of what a grammar can be made of.
"""

from __future__ import annotations

import re

# Escapes and whole classes, in which brackets are characters, and what opens, closes, divides or repeats.
_PIECES = (
    r"\\Q.*?(?:\\E|$)"
    r"|\\."
    r"|\[\^?%s(?:\\.|[^\]\\])*+(?P<class_end>\]?)"
    r"|\{(?P<least>[0-9]{1,9}),(?P<most>[0-9]{1,9})\}"
    r"|\(\?|\(\*|."
)
# In ECMA 262 a ] closes a class even where it comes first; elsewhere it is a character there.
_READINGS = [re.compile(_PIECES % first, re.DOTALL) for first in ("", r"\]?")]
_RANGE = re.compile(r"\\.|(?P<first>[a-zA-Z0-9])-(?P<last>[a-zA-Z0-9])|.", re.DOTALL)


def fault_of(pattern: str) -> str:
    """What is wrong with it in every dialect; empty if nothing is."""
    faults = [_fault(reading, pattern) for reading in _READINGS]
    return faults[0] if all(faults) else ""


def _fault(reading: re.Pattern[str], pattern: str) -> str:
    depth, before = 0, "|"
    for piece in reading.finditer(pattern):
        text = piece.group()
        if text == "\\":
            return "it ends in a backslash that escapes nothing"
        if text[0] == "[" and not piece["class_end"]:
            return "a [ is not closed"
        if text[0] == "[" and any(found["first"] and found["first"] > found["last"] for found in _RANGE.finditer(text)):
            return "a range begins after its end"
        if piece["least"] and int(piece["least"]) > int(piece["most"]):
            return "a repetition has a lower bound above its upper one"
        if text in ("*", "+", "?") and before in ("|", "("):
            return f"nothing stands before a {text}"
        depth += {"(": 1, ")": -1}.get(text[0], 0)
        if depth < 0:
            return "a ) closes nothing"
        before = text
    return "a ( is not closed" if depth else ""
