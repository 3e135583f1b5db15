"""The page of figures: short, and every table is what the files in benchmarks/results give."""

from __future__ import annotations

import re

import pytest

from benchmarks import tables

MOST_WORDS = 900
_BLOCK = re.compile(r"<!-- begin (\S+) -->\n(.*?)\n<!-- end \1 -->", re.DOTALL)


def _blocks() -> dict[str, str]:
    return dict(_BLOCK.findall(tables.DOCUMENT.read_text(encoding="utf-8")))


def test_beside_its_tables_the_page_has_at_most_900_words() -> None:
    prose = _BLOCK.sub("", tables.DOCUMENT.read_text(encoding="utf-8"))
    assert len(prose.split()) <= MOST_WORDS


def test_every_table_of_the_page_is_a_generated_one() -> None:
    prose = _BLOCK.sub("", tables.DOCUMENT.read_text(encoding="utf-8"))
    assert "|---" not in prose
    assert list(_blocks()) == [block.name for block in tables.BLOCKS]


@pytest.mark.parametrize("block", tables.BLOCKS, ids=lambda block: block.name)
def test_a_table_shows_the_figures_of_its_files(block: tables.Block) -> None:
    assert _blocks()[block.name] == block.text(), "python -m benchmarks.tables writes it anew"
