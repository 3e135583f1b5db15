"""How checks state their expectations: a failure holds everything that a learner has to be told."""

from __future__ import annotations

import pytest
import torch

from mini_sglang.learn.checking import LessonError, expect, expect_close, expect_error, guards


def test_what_holds_is_silent() -> None:
    expect([1, 2], [1, 2], "numbers")
    expect_close(torch.tensor([1.0, 2.0]), [1.0, 2.0 + 1e-7], "values")
    with expect_error(ValueError, "a bad number", match="bad"):
        raise ValueError("a bad number")


def test_a_failure_tells_expected_got_rule_and_page() -> None:
    with pytest.raises(LessonError, match="free pages: expected 3, got 4") as raised:
        expect(4, 3, "free pages", invariant="none is lost", read="L2: Pages")
    assert (raised.value.invariant, raised.value.read) == ("none is lost", "L2: Pages")


def test_long_sequences_say_where_they_part() -> None:
    with pytest.raises(LessonError, match="first difference is at index 6"):
        expect([*range(6), 9, 9], list(range(8)), "tokens")
    with pytest.raises(LessonError, match="first difference is at index 8"):
        expect("12345678", "123456789", "text")


def test_tensors_are_not_compared_by_a_single_equality() -> None:
    with pytest.raises(TypeError, match="expect_close"):
        expect(torch.ones(2), torch.ones(2), "values")


def test_close_values_say_place_and_shape() -> None:
    with pytest.raises(LessonError, match=r"scores, at \[1, 0\], and 1 other of 4 values: expected 1, got 2"):
        expect_close(torch.tensor([[1.0, 1.0], [2.0, 3.0]]), torch.ones(2, 2), "scores")
    with pytest.raises(LessonError, match=r"shape of scores: expected \(2, 2\), got \(2,\)"):
        expect_close(torch.ones(2), torch.ones(2, 2), "scores")
    with pytest.raises(LessonError, match="got nan"):
        expect_close(float("nan"), float("nan"), "score")


def test_an_error_that_does_not_come_or_says_something_else_is_a_failure() -> None:
    with (
        pytest.raises(LessonError, match="twice: expected ValueError, got no error"),
        expect_error(ValueError, "twice"),
    ):
        pass
    with (
        pytest.raises(LessonError, match="got ValueError: other"),
        expect_error(ValueError, "twice", match="free already"),
    ):
        raise ValueError("other")
    with pytest.raises(KeyError), expect_error(ValueError, "twice"):
        raise KeyError("x")


def test_a_check_carries_the_names_of_its_pitfalls() -> None:
    @guards("one", "two")
    def check() -> None: ...

    assert check.guards == ("one", "two")  # type: ignore[attr-defined]
