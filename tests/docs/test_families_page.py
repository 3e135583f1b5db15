"""The tables of families in docs/api.md are what text/notations.py says.

`python -m tests.docs.test_families_page` writes them anew.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from mini_sglang.text.notations import NOTATIONS, THOUGHTS

PAGE = Path(__file__).parent.parent.parent / "docs" / "api.md"
CALL = {"name": "f", "arguments": {"a": 1}, "id": "abc123def"}


def code(text: str) -> str:
    """As code in a cell of a table."""
    line = re.sub(r" *\n *", " ", text).strip()
    return f"`{line}`".replace("|", "\\|") if "`" not in line else f"`` {line} ``"


def calls_table() -> Iterator[str]:
    yield "| Models | `--tool-call-parser` | A call of `f` with `a` 1 | Forced calls |"
    yield "|---|---|---|---|"
    for notation in NOTATIONS:
        names = ", ".join(map(code, notation.names))
        forced = "`required`, named" if notation.leading else "`required`, named, `strict`"
        yield f"| {notation.families} | {names} | {code(notation.write([CALL]))} | {forced} |"


def thoughts_table() -> Iterator[str]:
    yield "| Models | `--reasoning-parser` | Thoughts |"
    yield "|---|---|---|"
    for thoughts in THOUGHTS:
        if thoughts.opening:
            names = ", ".join(map(code, thoughts.names))
            yield f"| {thoughts.families} | {names} | {code(f'{thoughts.opening}…{thoughts.closings[0]}')} |"


def with_tables(page: str) -> str:
    for name, rows in (("calls", calls_table()), ("thoughts", thoughts_table())):
        begin, end = f"<!-- {name}: from text/notations.py -->\n", f"<!-- end of {name} -->\n"
        before, _, rest = page.partition(begin)
        page = "".join((before, begin, *(f"{row}\n" for row in rows), end, rest.partition(end)[2]))
    return page


def test_the_page_has_every_family() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert with_tables(page) == page


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
