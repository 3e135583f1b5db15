"""Numbers of JSON answers get no digits without end; other text, and what a grammar demands, is left as it is."""

from __future__ import annotations

import pytest

from mini_sglang.grammar.digits import MOST_DIGITS, MOST_EXPONENT_DIGITS, DigitLimit, NumberBound

TOKENS = [b"1", b"23", b"456,", b".", b"e", b",", b'"', b"a"]
NUMBER = {b"1", b"23", b"456,", b".", b"e", b","}  # what may come next in a number


def allowed(text: bytes, may_come: set[bytes]) -> set[bytes]:
    limit = DigitLimit([*TOKENS, text])
    bound = NumberBound(limit)
    bound.advance(len(TOKENS))
    mask = bound.apply(bytes([sum(1 << index for index, token in enumerate(TOKENS) if token in may_come), 0]))
    assert len(mask) == 2
    return {token for index, token in enumerate(TOKENS) if mask[index >> 3] >> (index & 7) & 1}


@pytest.mark.parametrize(
    ("text", "rest"),
    [
        (b"[", NUMBER),
        (b"7" * (MOST_DIGITS - 3), NUMBER),
        (b"7" * (MOST_DIGITS - 2), NUMBER - {b"456,"}),
        (b"7" * (MOST_DIGITS - 1), NUMBER - {b"456,", b"23"}),
        (b"7" * MOST_DIGITS, NUMBER - {b"456,", b"23", b"1"}),
        (b"7" * 100, NUMBER - {b"456,", b"23", b"1"}),
        (b"7" * MOST_DIGITS + b".", NUMBER),
        (b"7" * MOST_DIGITS + b"." + b"7" * MOST_DIGITS, NUMBER - {b"456,", b"23", b"1"}),
        (b"1e" + b"7" * MOST_EXPONENT_DIGITS, NUMBER - {b"456,", b"23", b"1"}),
        (b"1E-7", NUMBER - {b"456,", b"23"}),
    ],
)
def test_a_run_of_digits_does_not_go_on_beyond_its_length(text: bytes, rest: set[bytes]) -> None:
    assert allowed(text, NUMBER) == rest


def test_digits_in_text_go_on() -> None:
    for other in (b'"', b"a"):
        assert allowed(b'"' + b"7" * 100, NUMBER | {other}) == NUMBER | {other}


def test_digits_that_must_come_come() -> None:
    assert allowed(b"7" * 100, {b"1", b"23"}) == {b"1", b"23"}
