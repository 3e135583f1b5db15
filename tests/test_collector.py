"""Garbage is collected again after what must not be held up, and not where nobody wanted it."""

from __future__ import annotations

import gc

import pytest

from mini_sglang.collector import no_collections


def test_nothing_is_collected_meanwhile_even_if_it_fails() -> None:
    def fail() -> None:
        with no_collections():
            assert not gc.isenabled()
            raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        fail()
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        with no_collections(), no_collections():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
