"""No Triton kernel gives one value two names in front of a loop that changes both.

Triton decides which variables a loop carries by compiling the body once with the values from before the loop: a
variable is carried if the body ends with another value of it. If `a` and `b` are the same value there and the body says
`b = a`, then `b` seems unchanged, and the compiled kernel has the old `b` after the loop. The interpreter does not show
this, so the source is searched.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import mini_sglang.kernels

KERNELS = sorted(Path(mini_sglang.kernels.__path__[0]).glob("triton/*.py"))
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
    """Pairs of names that a kernel gives to one value and that a later loop both changes."""
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
