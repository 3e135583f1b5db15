"""Bounds the digits of numbers in JSON answers: a confused model would write them until its limit.

A grammar of JSON lets a number have any count of digits. Here a run of digits that is long enough may not go on, where
the grammar allows something else. Knows tokens and masks, and no schema: whether an answer is in a number it sees from
what may come next.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cached_property

MOST_DIGITS = 20  # in a row: what integers of 64 bits need, and more than floats hold
MOST_EXPONENT_DIGITS = 2
_TAIL = re.compile(rb"([0-9][eE][+-]?)?([0-9]+)\Z")
_TAIL_LENGTH = MOST_DIGITS + 4
_NOT_IN_NUMBERS = re.compile(rb'[a-df-zA-DF-Z"]')


class DigitLimit:
    """The bounds, for one vocabulary. Sets of tokens are integers that have bit i for token i."""

    def __init__(self, tokens: list[bytes]) -> None:
        self.tokens = tokens

    @cached_property
    def _by_leading_digits(self) -> list[int]:
        """At index n the tokens that begin with n digits at least; index 0 is empty."""
        counts = [len(re.match(rb"[0-9]*", token)[0]) for token in self.tokens]  # type: ignore[index]
        return [0] + [_set_of(count >= n for count in counts) for n in range(1, max(counts, default=0) + 1)]

    @cached_property
    def _not_in_numbers(self) -> int:
        return _set_of(_NOT_IN_NUMBERS.fullmatch(token) is not None for token in self.tokens)

    def apply(self, mask: bytes, tail: bytes) -> bytes:
        """The mask for the token after `tail`, the latest bytes of the answer."""
        match = _TAIL.search(tail)
        if match is None:
            return mask
        left = (MOST_EXPONENT_DIGITS if match[1] else MOST_DIGITS) - len(match[2])
        if left + 1 >= len(self._by_leading_digits):
            return mask
        allowed = int.from_bytes(mask, "little")
        bounded = allowed & ~self._by_leading_digits[max(left, 0) + 1]
        if not bounded or allowed & self._not_in_numbers:
            return mask
        return bounded.to_bytes(len(mask), "little")


class NumberBound:
    """The bounds for one answer, of which it keeps the latest bytes."""

    def __init__(self, limit: DigitLimit) -> None:
        self._limit = limit
        self._tail = b""

    def advance(self, token_id: int) -> None:
        self._tail = (self._tail + self._limit.tokens[token_id])[-_TAIL_LENGTH:]

    def apply(self, mask: bytes) -> bytes:
        return self._limit.apply(mask, self._tail)


def _set_of(members: Iterable[bool]) -> int:
    bits = bytearray()
    for index, is_member in enumerate(members):
        if index & 7 == 0:
            bits.append(0)
        bits[-1] |= is_member << (index & 7)
    return int.from_bytes(bits, "little")
