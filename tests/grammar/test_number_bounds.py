"""Bounds of numbers become ones that are read exactly, and never become wider."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mini_sglang.grammar.number_bounds import bounds_of

FIT = 2**63 - 2048  # however llguidance reads the float, it is a signed integer of 64 bits


@pytest.mark.parametrize(
    ("keywords", "expected"),
    [
        ({}, {}),
        ({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, {"minimum": -FIT, "maximum": FIT}),
        ({"type": "integer", "minimum": 2**53 + 1, "maximum": 2**53 + 3}, {"minimum": 2**53 + 2, "maximum": 2**53 + 2}),
        ({"type": "integer", "exclusiveMinimum": 1.5, "exclusiveMaximum": 4}, {"minimum": 2, "maximum": 3}),
        ({"type": ["integer", "null"], "minimum": 0.5}, {"minimum": 1}),
        ({"type": "integer", "minimum": 0, "exclusiveMinimum": True}, {"minimum": 1}),
        ({"type": "integer", "minimum": 0, "exclusiveMinimum": False}, {"minimum": 0}),
        ({"type": "integer", "minimum": 3, "exclusiveMinimum": 3}, {"minimum": 4}),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}, {"minimum": 1e-12, "maximum": 0.5}),
        ({"type": "number", "minimum": -0.5, "exclusiveMaximum": 0}, {"minimum": -0.5, "maximum": -1e-12}),
        ({"type": "number", "minimum": 0.1, "maximum": 0.1}, {"minimum": 0.1, "maximum": 0.1}),
        ({"type": "number", "maximum": 1.7976931348623157e308}, {}),
        ({"type": "number", "maximum": float("inf"), "minimum": float("-inf")}, {}),
        ({"type": "number", "minimum": -1e30, "maximum": 1e30}, {"minimum": -(10**18), "maximum": 10**18}),
        ({"type": "number", "multipleOf": 0.25}, {"multipleOf": 0.25, "minimum": -(10**18), "maximum": 10**18}),
        ({"type": "integer", "multipleOf": 7, "minimum": 0}, {"multipleOf": 7, "minimum": 0, "maximum": 2**63 - 1024}),
    ],
)
def test_bounds_are_read_as_they_are_meant(keywords: dict[str, Any], expected: dict[str, Any]) -> None:
    assert bounds_of(keywords) == expected


bounds = st.one_of(st.integers(-(2**64), 2**64), st.floats(-1e19, 1e19), st.floats(-1, 1))


@settings(deadline=None)
@given(st.sampled_from(["integer", "number"]), bounds, bounds, st.booleans(), st.booleans())
def test_no_bound_becomes_wider(kind: str, low: Any, high: Any, low_is_open: bool, high_is_open: bool) -> None:
    names = ("exclusiveMinimum" if low_is_open else "minimum", "exclusiveMaximum" if high_is_open else "maximum")
    try:
        bounded = bounds_of({"type": kind, names[0]: low, names[1]: high})
    except ValueError:
        return
    first, last = Decimal(repr(bounded["minimum"])), Decimal(repr(bounded["maximum"]))
    assert first <= last
    assert first > Decimal(repr(low)) if low_is_open else first >= Decimal(repr(low))
    assert last < Decimal(repr(high)) if high_is_open else last <= Decimal(repr(high))
