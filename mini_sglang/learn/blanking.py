"""Removes the bodies of functions from a module's source and leaves all else as it stands.

A function keeps its decorators, signature and docstring, and gets a line that says what to write. This works on text
and knows no lesson.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable

from mini_sglang.learn.symbols import body_after_docstring, find_symbol, first_line


def blank(source: str, functions: Iterable[str], lesson_id: str) -> str:
    """`source` without the bodies of `functions` (dotted names). Raises ValueError for a name that is no function."""
    tree, lines = ast.parse(source), source.splitlines()
    nodes = {name: _function(tree, name) for name in functions}
    for name, node in sorted(nodes.items(), key=lambda item: item[1].lineno, reverse=True):
        first, last = _body_lines(node, lines)
        indent = " " * (node.col_offset + 4)
        lines[first - 1 : last] = [f'{indent}raise NotImplementedError("{marker(lesson_id, name)}")']
    return "\n".join(lines) + "\n"


def marker(lesson_id: str, function: str) -> str:
    """The message of the error that a blanked function raises."""
    return f"{lesson_id}: write {function}"


def blanks_in(source: str, functions: Iterable[str], lesson_id: str) -> list[str]:
    """Those of `functions` that the learner has not begun to write."""
    raised = {
        argument.value
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)
        for argument in node.exc.args
        if isinstance(argument, ast.Constant)
    }
    return [function for function in functions if marker(lesson_id, function) in raised]


def _function(tree: ast.Module, name: str) -> ast.FunctionDef | ast.AsyncFunctionDef:
    node = find_symbol(tree, name)
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        raise ValueError(f"{name} is not a function")
    return node


def _body_lines(node: ast.FunctionDef | ast.AsyncFunctionDef, lines: list[str]) -> tuple[int, int]:
    """Numbers of the first and last line to remove; comments in front of the first statement are removed too."""
    body = body_after_docstring(node)
    if not body:
        raise ValueError(f"{node.name} has nothing but a docstring")
    first = first_line(body[0])
    if lines[first - 1][: body[0].col_offset].strip():
        raise ValueError(f"{node.name} has its body on the line of its signature")
    while not (before := lines[first - 2].strip()) or before.startswith("#"):
        first -= 1
    return first, node.end_lineno or first
