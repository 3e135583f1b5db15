"""Finds a symbol's lines in source text, through `ast` alone: nothing is imported or run."""

from __future__ import annotations

import ast

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def find_symbol(tree: ast.Module, name: str) -> ast.stmt:
    """The statement that defines a dotted name: a class, a function, or an assignment. Raises ValueError."""
    body, found = tree.body, None
    for part in name.split("."):
        candidates = [statement for statement in body if part in _names(statement)]
        if not candidates:
            raise ValueError(f"the module has no {name}")
        if len(candidates) > 1:
            raise ValueError(f"the module defines {name} {len(candidates)} times")
        found = candidates[0]
        body = found.body if isinstance(found, ast.ClassDef) else []
    if found is None:
        raise ValueError("a name must not be empty")
    return found


def _names(statement: ast.stmt) -> list[str]:
    if isinstance(statement, Definition):
        return [statement.name]
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    if isinstance(statement, ast.AnnAssign):
        targets = [statement.target]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def first_line(statement: ast.stmt) -> int:
    """The number of the statement's first line, decorators included."""
    decorators = statement.decorator_list if isinstance(statement, Definition) else []
    return min([statement.lineno, *(decorator.lineno for decorator in decorators)])


def body_after_docstring(definition: Definition) -> list[ast.stmt]:
    """The statements of a class or function without its docstring."""
    return definition.body[1:] if ast.get_docstring(definition, clean=False) is not None else definition.body
