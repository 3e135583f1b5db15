"""Errors about a caller's field say so in parts, and in the words of whoever reads them."""

from __future__ import annotations

import pickle

import pytest

from mini_sglang.errors import FieldError


def test_the_message_is_a_sentence_about_the_field() -> None:
    error = FieldError("top_p", "must be in (0, 1], got 2")
    assert str(error) == "top_p must be in (0, 1], got 2"
    assert (error.field, error.problem, error.others) == ("top_p", "must be in (0, 1], got 2", ())


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({}, "min_tokens must be at most max_tokens (5), got 6"),
        ({"min_tokens": "least"}, "least must be at most max_tokens (5), got 6"),
        ({"max_tokens": "most"}, "min_tokens must be at most most (5), got 6"),
        ({"min_tokens": "max_tokens", "max_tokens": "limit"}, "max_tokens must be at most limit (5), got 6"),
    ],
)
def test_fields_have_the_names_that_the_reader_knows(names: dict[str, str], message: str) -> None:
    error = FieldError("min_tokens", "must be at most max_tokens (5), got 6", "max_tokens")
    assert str(error.renamed(names)) == message


def test_only_the_fields_that_an_error_lists_are_renamed() -> None:
    error = FieldError("stop", "must not hold 'stop' or 'seed', as ignore_eos is set", "ignore_eos")
    names = {"stop": "ends", "seed": "start", "ignore_eos": "endless"}
    assert str(error.renamed(names)) == "ends must not hold 'stop' or 'seed', as endless is set"


def test_it_passes_between_processes() -> None:
    error = pickle.loads(pickle.dumps(FieldError("min_tokens", "must be below max_tokens", "max_tokens")))
    assert (str(error), error.others) == ("min_tokens must be below max_tokens", ("max_tokens",))
