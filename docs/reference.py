"""The page of the public Python names: what `mini_sglang` exports, from signatures, comments and docstrings.

Source text is read, nothing is imported. A public name without a docstring fails the build.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from mini_sglang import _MODULES
from mini_sglang.learn.lesson import module_source
from mini_sglang.learn.symbols import body_after_docstring, find_symbol, first_line

PAGE = "python.md"
INTRODUCTION = """# Python

Everything here is imported from `mini_sglang`. The page is made from the source, so it cannot fall behind.

"""


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    names = sorted(_MODULES, key=lambda name: (list(_MODULES.values()).index(_MODULES[name]), name))
    text = INTRODUCTION + "\n".join(describe(name) for name in names)
    files.append(File.generated(config, PAGE, content=text))
    return files


def describe(name: str) -> str:
    """The Markdown of one public class. Raises ValueError if it says nothing of itself."""
    module = f"mini_sglang.{_MODULES[name]}"
    source = module_source(module)
    definition = find_symbol(ast.parse(source), name)
    if not isinstance(definition, ast.ClassDef) or not (docstring := ast.get_docstring(definition)):
        raise ValueError(f"{module}:{name} is public and needs to be a class with a docstring")
    lines = source.splitlines()
    parts = [f"## {name}\n", f"`{module}.{name}`\n", as_markdown(docstring)]
    if options := _options(definition):
        parts += ["| Field | Type | Default | |", "|---|---|---|---|", *options, ""]
    elif fields := _fields(definition, lines):
        parts.append(_code(fields))
    for method in definition.body:
        if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef) and _is_public(method):
            parts.append(_method(name, method, lines))
    return "\n".join(parts)


def as_markdown(docstring: str) -> str:
    """A docstring's prose as it is, its indented examples as code that is set as Python."""
    paragraphs = []
    for paragraph in docstring.split("\n\n"):
        indented = all(line.startswith("    ") for line in paragraph.splitlines())
        paragraphs.append(_code([line[4:] for line in paragraph.splitlines()]) if indented else paragraph + "\n")
    return "\n".join(paragraphs)


def _code(lines: list[str]) -> str:
    return "\n".join(["```python", *lines, "```", ""])


def _is_public(method: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return method.name == "__init__" or not method.name.startswith("_")


def _options(definition: ast.ClassDef) -> list[str]:
    """A table's row for each field that explains itself: the settings."""
    rows = []
    for field in definition.body:
        if isinstance(field, ast.AnnAssign) and isinstance(field.value, ast.Call):
            made_by, arguments = ast.unparse(field.value.func), field.value.args
            if made_by == "_option":
                kind = ast.unparse(field.annotation).replace("|", "\\|")
                default, explanation = ast.unparse(arguments[0]), ast.literal_eval(arguments[1])
                rows.append(f"| `{ast.unparse(field.target)}` | `{kind}` | `{default}` | {explanation} |")
    return rows


def _fields(definition: ast.ClassDef, lines: list[str]) -> list[str]:
    """The fields and members as they are written, their comments too."""
    kept: list[str] = []
    for statement in body_after_docstring(definition):
        if isinstance(statement, ast.AnnAssign | ast.Assign):
            kept += lines[statement.lineno - 1 : statement.end_lineno]
    return [line.removeprefix("    ") for line in kept]


def _method(owner: str, method: ast.FunctionDef | ast.AsyncFunctionDef, lines: list[str]) -> str:
    head = lines[first_line(method) - 1 : method.body[0].lineno - 1] or [lines[method.lineno - 1]]
    signature = [line.removeprefix("    ") for line in head]
    docstring = ast.get_docstring(method)
    signature[-1] = signature[-1].removesuffix(":")
    return f"### `{owner}.{method.name}`\n\n{_code(signature)}\n{as_markdown(docstring) if docstring else ''}"
