"""The bounds of numbers in a JSON schema, in the few forms that llguidance keeps exactly.

It reads bounds as floats of 64 bits, makes integers of 64 bits of them, and does not keep all exclusive ones. Here
every bound becomes an inclusive one that it reads as it is meant, never a wider one. Knows no other keyword.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from decimal import ROUND_CEILING, Context, Decimal, localcontext
from typing import Any

from mini_sglang.errors import shorten
from mini_sglang.sampling_params import Json

_LARGEST_INTEGER = 2**63 - 1024  # the largest float that fits in 64 bits
_LARGEST_NUMBER = 10**18
_ANY_ANSWER = Decimal(10) ** 120  # larger than any number in an answer, whose digits and exponents are bounded
_KEYWORDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_PLACES = 12  # after the point
_MAX_MULTIPLE = 100_000  # the automaton has as many states


class UnheldBounds(ValueError):
    """Bounds that are valid, and that no grammar holds: these keywords."""

    def __init__(self, problem: str, keywords: Sequence[str] = _KEYWORDS) -> None:
        super().__init__(problem)
        self.keywords = keywords


def bounds_of(given: Json) -> Json:
    """`minimum`, `maximum` and `multipleOf` for the number keywords of a schema. Raises ValueError, UnheldBounds."""
    types = given.get("type", "number")
    is_integer = types == "integer" or (isinstance(types, list) and "integer" in types and "number" not in types)
    with localcontext(Context(prec=800)):
        bounds = _limits(given, is_integer)
    if "multipleOf" in given:
        bounds["multipleOf"] = _multiple(given["multipleOf"])
        # or it would have digits without end, of which few ends are multiples
        largest = _LARGEST_INTEGER if is_integer else _LARGEST_NUMBER
        bounds = {"minimum": -largest, "maximum": largest, **bounds}
    return bounds


def _limits(given: Json, is_integer: bool) -> Json:
    low, low_is_open = _tightest(given, "minimum", "exclusiveMinimum", 1)
    high, high_is_open = _tightest(given, "maximum", "exclusiveMaximum", -1)
    if low is not None and high is not None and (low > high or (low == high and (low_is_open or high_is_open))):
        raise ValueError(f"minimum and maximum allow no number between {low:g} and {high:g}")
    if is_integer:
        low = None if low is None else _above(low, Decimal(1), low_is_open)
        high = None if high is None else -_above(-high, Decimal(1), high_is_open)
        return _in_range(low, high, Decimal(_LARGEST_INTEGER))
    if low != high:
        step = Decimal(1).scaleb(-_PLACES)
        if low is not None and high is not None:
            step = min(step, Decimal(1).scaleb((high - low).adjusted() - 3))
        low = None if low is None else _above(low, step, low_is_open)
        high = None if high is None else -_above(-high, step, high_is_open)
    return _in_range(low, high, Decimal(_LARGEST_NUMBER))


def _above(value: Decimal, step: Decimal, is_open: bool) -> Decimal:
    """The first multiple of `step` that is not below `value`, or with `is_open` is above it."""
    multiple = (value / step).to_integral_value(ROUND_CEILING) * step
    return multiple + step if is_open and multiple == value else multiple


def _tightest(given: Json, inclusive: str, exclusive: str, sign: int) -> tuple[Decimal | None, bool]:
    """The bound, and whether it is exclusive. `sign` is 1 for a lower bound, -1 for an upper one."""
    bounds = [(value, False)] if (value := _number(given, inclusive)) is not None else []
    if isinstance(given.get(exclusive), bool):  # of draft 4
        bounds = [(value, bool(given[exclusive])) for value, _ in bounds]
    elif (value := _number(given, exclusive)) is not None:
        bounds.append((value, True))
    return max(bounds, key=lambda bound: (sign * bound[0], bound[1]), default=(None, False))


def _number(given: Json, keyword: str) -> Decimal | None:
    """A bound as it is written; None if there is none, or it is beyond all numbers on the side that it allows."""
    value: Any = given.get(keyword)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value:
        raise ValueError(f"{keyword} must be a number, got {shorten(value)}")
    number = Decimal(repr(value)) if isinstance(value, float) else Decimal(value)
    if abs(number) < _ANY_ANSWER:
        return number
    if ("aximum" in keyword) == (number > 0):
        return None
    raise UnheldBounds(f"{keyword} must be within what 64 bits hold, got {shorten(value)}", [keyword])


def _in_range(low: Decimal | None, high: Decimal | None, largest: Decimal) -> Json:
    if low is not None and high is not None and low > high:
        raise ValueError("minimum and maximum allow no number between them")
    if low is not None and low > largest:
        raise UnheldBounds(f"minimum may be at most {int(largest)}")
    if high is not None and high < -largest:
        raise UnheldBounds(f"maximum must be at least {-int(largest)}")
    bounds: Json = {}
    if low is not None:
        bounds["minimum"] = _as_float(max(low, -largest), 1)
    if high is not None:
        bounds["maximum"] = _as_float(min(high, largest), -1)
    if bounds.get("minimum", -math.inf) > bounds.get("maximum", math.inf):
        raise UnheldBounds("minimum and maximum allow no number between them that a float of 64 bits holds")
    return bounds


def _as_float(value: Decimal, sign: int) -> int | float:
    """The nearest value of a float of 64 bits that is not below (`sign` 1) or above (-1) this one."""
    number = float(value)
    while any(sign * (read - value) < 0 for read in _readings(number)):
        number = math.nextafter(number, sign * math.inf)
    return int(number) if number.is_integer() else number


def _readings(number: float) -> tuple[Decimal, ...]:
    """What llguidance may take a float for: large ones with their exact digits, or with zeros after the first 17."""
    shortest = Decimal(repr(number))
    return (shortest, Decimal(number)) if number.is_integer() else (shortest,)


def _multiple(value: Any) -> int | float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ValueError(f"multipleOf must be a number greater than 0, got {shorten(value)}")
    number = Decimal(repr(value)) if isinstance(value, float) else Decimal(value)
    _, digits, exponent = number.normalize().as_tuple()
    assert isinstance(exponent, int)
    steps = int(number) if exponent >= 0 else int("".join(map(str, digits)))
    if steps > _MAX_MULTIPLE or exponent < -_PLACES:
        problem = f"multipleOf may be at most {_MAX_MULTIPLE} without its point, got {shorten(value)}"
        raise UnheldBounds(problem, ["multipleOf"])
    return value
