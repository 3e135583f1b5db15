"""The list of removals that no test notices is true to the source, and the program that makes it removes statements."""

from __future__ import annotations

import importlib.util
import logging
from typing import Any

import pytest

from tests import mutants
from tests.mutants import Outcome, Removal

SOURCE = '''
"""A module."""
LIMIT = 3


class Counter:
    """Counts."""

    start: int = 0

    def __init__(self) -> None:
        self.count: int = 0
        self.name: str

    def add(self, step: int) -> int:
        """Count on."""
        if step < 0:
            raise ValueError("too small")
        assert step is not None
        logger.info("counting")
        for _ in range(step):
            self.count += 1
            if self.count > LIMIT:
                self.count += 1
        return self.count
'''


def test_statements_of_functions_can_be_removed_and_declarations_cannot() -> None:
    found = mutants.removals("m", SOURCE)
    assert [(removal.function, removal.statement, removal.occurrence) for removal in found] == [
        ("Counter.__init__", "self.count: int = 0", 1),
        ("Counter.add", "raise ValueError('too small')", 1),
        ("Counter.add", "self.count += 1", 1),
        ("Counter.add", "self.count += 1", 2),
        ("Counter.add", "return self.count", 1),
    ]
    assert SOURCE.splitlines()[list(found.values())[3] - 1] == "                self.count += 1"


def test_one_statement_of_several_equal_ones_is_removed() -> None:
    removal = Removal("m", "Counter.add", "self.count += 1", 2)
    names: dict[str, Any] = {"logger": logging.getLogger()}
    exec(compile(mutants.without(removal, SOURCE), "m", "exec"), names)
    assert names["Counter"]().add(5) == 5


def test_a_statement_that_is_not_there_cannot_be_removed() -> None:
    with pytest.raises(KeyError, match=r"m: Counter.add: self.count \+= 2"):
        mutants.without(Removal("m", "Counter.add", "self.count += 2"), SOURCE)


def test_a_module_is_imported_without_the_statement() -> None:
    removal = Removal("mini_sglang.scheduling.page_allocator", "PageAllocator.release", "free.append(page)")
    finder = mutants._Finder(removal.module, mutants.without(removal, mutants.source_of(removal.module)))
    assert finder.find_spec("mini_sglang.scheduling.policy", None) is None
    spec = finder.find_spec(removal.module, None)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    allocator = module.PageAllocator(2)
    allocator.release(allocator.allocate(2))
    assert allocator.num_free == 0


def test_what_is_listed_is_still_there_and_has_a_reason() -> None:
    listed = mutants.read_listed()
    assert mutants.gone_from(listed) == []
    assert all(len(reason.split()) >= 4 for reason in listed.values())


def test_the_report_names_what_the_list_lacks_and_what_it_need_not_have() -> None:
    module = "mini_sglang.scheduling.policy"
    found = [Outcome(removal, line) for removal, line in mutants.removals(module, mutants.source_of(module)).items()]
    caught, known, unknown = found[0], found[1], found[2]
    caught.verdict, caught.by = "caught", "test_policy.py::test"
    gone = Removal(module, "Policy.order", "return []")
    text, is_well = mutants.report(found[:3], dict.fromkeys((caught.removal, known.removal, gone), "why"))
    assert not is_well
    assert f"no test notices, and no reason is listed: {unknown.removal}" in text
    assert f"listed, but noticed by test_policy.py::test: {caught.removal}" in text
    assert f"listed, but not there any more: {gone}" in text
    assert str(known.removal) not in text


def test_the_report_wants_enough_of_them_to_be_noticed() -> None:
    outcome = Outcome(Removal("mini_sglang.scheduling.policy", "Policy.sort_key", "return (0, request.arrival)"), 1)
    assert not mutants.report([outcome], {outcome.removal: "why"})[1]
    outcome.verdict = "endless"
    assert mutants.report([outcome], {})[1]
