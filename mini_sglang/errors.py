"""What errors about a caller's values have in common. Knows no other module."""

from __future__ import annotations

import re
from collections.abc import Mapping


class FieldError(ValueError):
    """A value of the caller's is wrong. The message is a sentence about `field`, of which `problem` is the rest.

    `others` are further fields that the problem names, for callers who know fields by other names:

        FieldError("min_tokens", "must be at most max_tokens, got 9", "max_tokens")
    """

    def __init__(self, field: str, problem: str, *others: str) -> None:
        super().__init__(field, problem, *others)
        self.field = field
        self.problem = problem
        self.others = others

    def __str__(self) -> str:
        return f"{self.field} {self.problem}"

    def renamed(self, names: Mapping[str, str]) -> FieldError:
        """The same error with every field under the name that `names` gives for it, if it gives one."""
        field, *others = (names.get(name, name) for name in (self.field, *self.others))
        problem = self.problem
        if self.others:
            pattern = "|".join(map(re.escape, self.others))
            problem = re.sub(rf"\b({pattern})\b", lambda match: names.get(match[0], match[0]), problem)
        return FieldError(field, problem, *others)


def shorten(value: object, length: int = 80) -> str:
    """A value for an error message, cut to a readable length; costs little however large the value is."""
    if isinstance(value, (dict, list, tuple)):
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value)} entries"
    if isinstance(value, int) and value.bit_length() > 256:
        return f"an integer of {value.bit_length()} bits"
    text = repr(value[: length + 1] if isinstance(value, str) else value)
    return text if len(text) <= length + 2 else f"{text[:length]}…"
