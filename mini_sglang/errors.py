"""What errors about a caller's values have in common. Knows no other module."""

from __future__ import annotations


def shorten(value: object, length: int = 80) -> str:
    """A value for an error message, cut to a readable length; costs little however large the value is."""
    if isinstance(value, (dict, list, tuple)):
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value)} entries"
    if isinstance(value, int) and value.bit_length() > 256:
        return f"an integer of {value.bit_length()} bits"
    text = repr(value[: length + 1] if isinstance(value, str) else value)
    return text if len(text) <= length + 2 else f"{text[:length]}…"
