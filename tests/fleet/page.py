"""The commands in docs/deploy.md."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = (Path(__file__).parents[2] / "docs" / "deploy.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    """The part of the page under a heading, up to the next heading."""
    [found] = re.findall(rf"^#+ {re.escape(title)}\n(.*?)(?=^#|\Z)", PAGE, re.MULTILINE | re.DOTALL)
    return str(found)


def blocks(text: str, language: str = "") -> list[str]:
    """What stands in its fences of that language."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def commands(text: str) -> list[str]:
    """The lines of its blocks of commands; one that goes on over several lines is one."""
    return [line for block in blocks(text) for line in re.sub(r"\\\n\s*", "", block).splitlines()]
