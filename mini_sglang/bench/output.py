"""How every `mini-sglang bench` command shows what it found: tables on stdout, figures as JSON, pictures.

Knows no measurement.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn
from rich.table import Table


def table(title: str, first: str, *columns: str, names: bool = True) -> Table:
    """An empty table of figures; its first column is for names, or with `names` false for figures too."""
    made = Table(title=title, title_justify="left")
    made.add_column(first, justify="left" if names else "right")
    for column in columns:
        made.add_column(column, justify="right")
    return made


def show(parts: Iterable[Table | str], figures: Mapping[str, Any], json_path: Path | None) -> None:
    """Print tables and lines, and write the figures, in which dataclasses are objects, if there is a path for them."""
    console = Console()
    for part in parts:
        console.print(part, markup=False, highlight=False)
    if json_path is not None:
        json_path.write_text(json.dumps(figures, indent=1, default=asdict) + "\n")


def progress_bar(*columns: ProgressColumn) -> Progress:
    """A bar on a terminal's stderr that is drawn only when it moves: drawing takes time from what is measured."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), *columns)
    return Progress(*columns, console=console, transient=True, auto_refresh=False, disable=not console.is_terminal)


def load_pyplot() -> Any:
    """matplotlib's pyplot, without a screen. Raises ValueError that names the extra where it is missing."""
    try:
        import matplotlib
    except ImportError:
        raise ValueError("--plot needs matplotlib: pip install 'mini-sglang[bench]'") from None
    matplotlib.use("agg")
    from matplotlib import pyplot

    return pyplot
