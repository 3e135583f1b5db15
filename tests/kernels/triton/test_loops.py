"""What Triton's compiler does not see and its interpreter does not show: two names of one value before a loop.

Triton takes a variable for one that a loop changes if it ends the body as another value than it began, in a first visit
that begins with the values before the loop. If `a` and `b` are one value there and the body says `b = a`, then `b`
seems to stay, and after the loop it is what it was before.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import mini_sglang.kernels

KERNELS = sorted(Path(mini_sglang.kernels.__path__[0]).glob("*.py"))
WRONG = """
@triton.jit
def kernel(low, high, n):
    middle = low
    while n > 0:
        low = middle
        middle = (low + high) >> 1
        n -= 1
"""


def twins(source: str) -> Iterator[str]:
    """Names that are given to one value in a kernel, and both changed by a loop behind."""
    for function in ast.walk(ast.parse(source)):
        if isinstance(function, ast.FunctionDef) and any("jit" in ast.unparse(how) for how in function.decorator_list):
            for node in ast.walk(function):
                if isinstance(node, ast.stmt):
                    yield from twins_in(getattr(node, "body", []))
                    yield from twins_in(getattr(node, "orelse", []))


def twins_in(block: list[ast.stmt]) -> Iterator[str]:
    pairs: set[tuple[str, str]] = set()
    for statement in block:
        stored = stored_in(statement)
        if isinstance(statement, ast.While | ast.For):
            yield from (f"{one} = {other}, line {statement.lineno}" for one, other in pairs if {one, other} <= stored)
        pairs = {pair for pair in pairs if not stored & set(pair)}
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Name):
            pairs |= {(name, statement.value.id) for name in stored}


def stored_in(statement: ast.stmt) -> set[str]:
    return {node.id for node in ast.walk(statement) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}


def test_the_search_finds_what_it_is_for() -> None:
    assert list(twins(WRONG)) == ["middle = low, line 5"]
    assert not list(twins(WRONG.replace("middle = low\n", "middle = low + 0\n", 1)))


@pytest.mark.parametrize("path", KERNELS, ids=lambda path: path.stem)
def test_no_loop_changes_two_names_of_one_value(path: Path) -> None:
    assert not list(twins(path.read_text()))
