"""Replaces `--8<-- "module:Symbol"` lines of a Markdown page with the engine's source.

A quote names a symbol, so it can neither go stale nor point at the wrong lines; one that does not resolve is an error.
"""

from __future__ import annotations

import ast
import re
import textwrap

from mini_sglang.learn.lesson import module_source
from mini_sglang.learn.symbols import Definition, body_after_docstring, find_symbol, first_line

_LINE = re.compile(r'^(?P<indent>[ \t]*)--8<-- "(?P<reference>[^"]+)"[ \t]*$', re.MULTILINE)


def expand(markdown: str) -> str:
    """The page with every quote replaced. Raises ValueError that names a quote which does not resolve."""
    return _LINE.sub(lambda found: textwrap.indent(quote(found["reference"]), found["indent"]).rstrip("\n"), markdown)


def quote(reference: str) -> str:
    """The dedented source of `module:Symbol`: a class, a function or a constant, by its dotted name in the module.

    `module:Symbol#body` leaves out the docstring, `module:Symbol#head` keeps only signature and docstring, and
    `module:__doc__` is the module's docstring. Raises ValueError that names the quote if it does not resolve.
    """
    module, _, rest = reference.partition(":")
    symbol, _, part = rest.partition("#")
    if part not in ("", "body", "head"):
        raise ValueError(f"quote {reference!r}: #body or #head may follow a symbol, got #{part}")
    try:
        source = module_source(module)
        tree = ast.parse(source)
        if symbol == "__doc__":
            return (ast.get_docstring(tree) or "") + "\n"
        node = find_symbol(tree, symbol)
    except ValueError as error:
        raise ValueError(f"quote {reference!r}: {error}") from error
    lines = source.splitlines()
    first, last = first_line(node), node.end_lineno or node.lineno
    kept = lines[first - 1 : last]
    if part and isinstance(node, Definition) and body_after_docstring(node) is not node.body:
        docstring = node.body[0]
        end = docstring.end_lineno or docstring.lineno
        kept = lines[first - 1 : end] if part == "head" else lines[first - 1 : docstring.lineno - 1] + lines[end:last]
    return textwrap.dedent("\n".join(kept)) + "\n"
