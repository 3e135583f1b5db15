"""How a lesson's check.py states its expectations, so that a failure can be shown in the learner's terms.

It is light, since every check imports it, and knows neither pytest nor the engine.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np

Check = TypeVar("Check", bound=Callable[..., object])


class LessonError(AssertionError):
    """An expectation that does not hold. All fields are texts to show."""

    def __init__(self, got: str, expected: str, what: str, invariant: str = "", read: str = "") -> None:
        super().__init__(f"{what}: expected {expected}, got {got}")
        self.got, self.expected, self.what, self.invariant, self.read = got, expected, what, invariant, read


def guards(*names: str) -> Callable[[Check], Check]:
    """Mark the check that catches the pitfalls `names` (one, at most two)."""

    def mark(check: Check) -> Check:
        check.guards = names  # type: ignore[attr-defined]
        return check

    return mark


def expect(got: object, expected: object, what: str, *, invariant: str = "", read: str = "") -> None:
    """Raise LessonError unless `got == expected`.

    `what` says which value it is, `invariant` which rule of the lesson would be broken, `read` which part of its page
    explains it. Tensors have no single `==`: see `expect_close`.
    """
    equal = got == expected
    if not isinstance(equal, bool):
        raise TypeError(f"{what}: == gives a {type(equal).__name__}; compare tensors with expect_close")
    if not equal:
        raise LessonError(repr(got), repr(expected), _with_place(what, got, expected), invariant, read)


def expect_close(
    got: Any, expected: Any, what: str, *, tolerance: float = 1e-5, invariant: str = "", read: str = ""
) -> None:
    """Raise LessonError unless two tensors, arrays, lists or numbers have equal shapes and nearly equal values.

    Nearly: within `tolerance`, absolute or relative to the expected value. NaN is close to nothing.
    """
    ours, theirs = _array(got), _array(expected)
    if ours.shape != theirs.shape:
        raise LessonError(str(ours.shape), str(theirs.shape), f"shape of {what}", invariant, read)
    close = np.isclose(ours, theirs, rtol=tolerance, atol=0) | np.isclose(ours, theirs, rtol=0, atol=tolerance)
    bad = np.argwhere(~close)
    if len(bad):
        place = bad[0].tolist()
        share = f", and {len(bad) - 1} other of {close.size} values" if len(bad) > 1 else ""
        where = f"{what}, at {place}{share}" if place else what
        raise LessonError(f"{ours[*place]:.6g}", f"{theirs[*place]:.6g}", where, invariant, read)


@contextmanager
def expect_error(
    kind: type[Exception], what: str, *, match: str = "", invariant: str = "", read: str = ""
) -> Iterator[None]:
    """Raise LessonError unless the block raises `kind` with a message in which the pattern `match` is found."""
    wanted = kind.__name__ + (f" whose message has {match!r}" if match else "")
    try:
        yield
    except kind as error:
        if re.search(match, str(error)) is None:
            raise LessonError(f"{type(error).__name__}: {error}", wanted, what, invariant, read) from error
        return
    raise LessonError("no error", wanted, what, invariant, read)


def _array(value: Any) -> np.ndarray[Any, Any]:
    """As float64. Through a list, since there are tensors that numpy does not take."""
    return np.asarray(value.tolist() if hasattr(value, "tolist") else value, float)


def _with_place(what: str, got: object, expected: object) -> str:
    """`what`, for long sequences that begin alike with the index of the first difference."""
    if not isinstance(got, Sequence) or not isinstance(expected, Sequence) or max(len(got), len(expected)) < 8:
        return what
    pairs = zip(got, expected, strict=False)
    first = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(got), len(expected)))
    return f"{what} (the first difference is at index {first})" if first else what
