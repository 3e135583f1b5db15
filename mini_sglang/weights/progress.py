"""A bar on stderr while something takes long at start, on a terminal or in a notebook; it is gone when that is done.

Elsewhere there is nothing at all, not even an empty line: a file has no use for a bar, and may be on a full disk.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import TypeVar

Item = TypeVar("Item")


def progress(items: Sequence[Item], title: str, *, show: bool = True) -> Iterable[Item]:
    """The items, with a bar that counts those that are done, where somebody can see it and `show` allows it."""
    if not (show and _is_seen()):
        return items
    from rich.console import Console  # only where it is of use: a server in the background has none
    from rich.progress import track

    return track(items, title, console=Console(stderr=True), transient=True)


def _is_seen() -> bool:
    on_terminal = sys.stderr is not None and sys.stderr.isatty()
    return on_terminal or "ipykernel" in sys.modules
