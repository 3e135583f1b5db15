"""docs/matrix.md: the table of all pairs, what each feature is, and why some pairs make no sense.

The page's own text stands around what is made here, between two markers.
"""

from __future__ import annotations

from pathlib import Path

from tests.feature_matrix.cells import CELLS
from tests.feature_matrix.features import FEATURES

PATH = Path(__file__).parents[2] / "docs" / "matrix.md"
BEGIN, END = "<!-- made by python -m tests.test_feature_matrix -->\n", "<!-- end of what is made -->\n"


def updated(text: str) -> str:
    """The page with what the declared features give. Raises ValueError if it has no place for it."""
    before, found, rest = text.partition(BEGIN)
    _, found_end, after = rest.partition(END)
    if not found or not found_end:
        raise ValueError(f"{PATH} must hold the lines {BEGIN!r} and {END!r}")
    return "".join([before, BEGIN, "\n", table(), "\n", legend(), "\n", senseless_pairs(), "\n", END, after])


def table() -> str:
    """A row and a column for each feature, and how many cells there are of either kind."""
    marks = {frozenset(cell.features): "●" if cell.reason is None else "–" for cell in CELLS}
    lines = [["", *(feature.short for feature in FEATURES)], [":--", *[":-:"] * len(FEATURES)]]
    lines += [[row.name, *(marks.get(frozenset((row, one)), "") for one in FEATURES)] for row in FEATURES]
    run = sum(cell.reason is None for cell in CELLS)
    count = f"● runs ({run} pairs), – makes no sense ({len(CELLS) - run}), for the reason below.\n\n"
    return count + "".join(f"| {' | '.join(line)} |\n" for line in lines)


def legend() -> str:
    rows = [f"| {feature.name} | {feature.short} | {feature.meaning} |\n" for feature in FEATURES]
    return "".join(["| Feature | Column | What a cell has of it |\n", "| :-- | :-- | :-- |\n", *rows])


def senseless_pairs() -> str:
    return "".join(f"- {cell.row.name} × {cell.column.name}: {cell.reason}\n" for cell in CELLS if cell.reason)
