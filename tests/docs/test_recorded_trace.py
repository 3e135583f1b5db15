"""The run that the tour's figure plays is the run that the engine makes today, but for how long it takes."""

from __future__ import annotations

import json
from typing import Any

from docs.figures.record_trace import TRACE, record


def without_figures(stages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Times, and probabilities, whose last digit depends on the machine, left out."""
    return [
        {**stage, "ms": 0, "facts": {name: text for name, text in stage["facts"].items() if name != "likeliest"}}
        for stage in stages
    ]


def test_the_recorded_run_is_the_engines() -> None:
    recorded = json.loads(TRACE.read_text(encoding="utf-8"))
    assert [stage["stage"] for stage in recorded] == [1, 2, 3, *[4, 5, 6, 7] * 6]
    assert without_figures(recorded) == without_figures(record())
