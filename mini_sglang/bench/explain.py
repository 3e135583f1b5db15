"""`mini-sglang bench explain`: what a step log says about where the time went. Arithmetic over its lines, no engine."""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from mini_sglang.bench.step_history import History, Life, TimedStep
from mini_sglang.bench.timeline import draw

PHASES = ("schedule", "launch", "wait", "update")
_NUM_SLOWEST = 5


def explain(path: Path, *, json_path: Path | None, plot_path: Path | None, window: tuple[float, float | None]) -> None:
    """Print the tables of a log; write its figures as JSON and its time line as SVG where that is asked for.

    `window`: seconds of the log that the time line shows; None: to its end. Raises ValueError and OSError.
    """
    if plot_path is not None and plot_path.suffix != ".svg":
        raise ValueError(f"--plot must name an .svg file, got {plot_path}")
    history = History(path)
    console = Console()
    for table in tables(history):
        console.print(table)
    if json_path is not None:
        json_path.write_text(json.dumps(figures(history), indent=1) + "\n")
    if plot_path is not None:
        plot_path.write_text(draw(history, window))
        console.print(f"time line: {plot_path}", soft_wrap=True)


def time_by_place(history: History) -> dict[str, int]:
    """Where every microsecond from the first line to the last was spent: phases, between steps, without a request."""
    total = history.end_us - history.start_us
    places = {phase: sum(timed.step.host_us.get(phase, 0) for timed in history.steps) for phase in PHASES}
    between = max(total - sum(places.values()) - history.idle_us, 0)
    return {**places, "between steps": between, "no request": history.idle_us}


def figures(history: History) -> dict[str, Any]:
    """What the tables show, in seconds."""
    lives, steps = history.lives, history.steps
    return {
        "seconds": (history.end_us - history.start_us) / 1e6,
        "place_s": {place: us / 1e6 for place, us in time_by_place(history).items()},
        "device_s": sum(timed.step.device_us or 0 for timed in steps) / 1e6 if history.is_on_gpu else None,
        "steps": len(steps),
        "failed_steps": sum(timed.step.error is not None for timed in steps),
        "tokens_computed": sum(timed.step.tokens for timed in steps),
        "tokens_generated": sum(life.tokens for life in lives),
        "prompt_tokens": sum(life.prompt_tokens for life in lives if life.started_us is not None),
        "cached_tokens": sum(life.cached_tokens for life in lives),
        "requests": len(lives),
        "ended": dict(Counter(life.reason for life in lives if life.reason is not None)),
        "preemptions": sum(len(life.preempted_us) for life in lives),
        "kinds": {
            kind: {"steps": len(times), "seconds": sum(times) / 1e6, "median_s": statistics.median(times) / 1e6}
            for kind, times in _durations(steps).items()
        },
        "requests_s": {name: _quantiles(values) for name, values in _latencies(lives).items()},
        "most_used_pages": max(timed.step.used_pages for timed in steps),
        "num_pages": history.header.config["num_pages"],
    }


def tables(history: History) -> list[Table]:
    """The figures as tables."""
    return [_place_table(history), _kind_table(history), _request_table(history), _slowest_table(history)]


def _place_table(history: History) -> Table:
    total = max(history.end_us - history.start_us, 1)
    on_gpu = history.is_on_gpu
    meaning = {
        "schedule": "deciding who runs",
        "launch": "handing steps to the device" if on_gpu else "computing them: the model, on this CPU",
        "wait": "for the device" if on_gpu else "",
        "update": "taking tokens in, ending requests",
        "between steps": "messages, text, whatever called the engine",
        "no request": "nothing to do",
    }
    places = time_by_place(history)
    table = Table(title=f"Where {total / 1e6:.3f} s went ({len(history.steps)} steps)", title_justify="left")
    for name, justify in (("", "left"), ("s", "right"), ("share", "right"), ("µs a step", "right"), ("", "left")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    for place, us in places.items():
        a_step = "" if place == "no request" else f"{us / len(history.steps):,.0f}"
        table.add_row(place, f"{us / 1e6:.3f}", f"{us / total:.1%}", a_step, meaning[place])
    device = sum(timed.step.device_us or 0 for timed in history.steps)
    if on_gpu:
        table.add_section()
        idle = max(total - places["no request"] - device, 0)
        table.add_row("device", f"{device / 1e6:.3f}", f"{device / total:.1%}", f"{device / len(history.steps):,.0f}",
                      "busy with steps, beside the host's phases")  # fmt: skip
        table.add_row("device waits", f"{idle / 1e6:.3f}", f"{idle / total:.1%}", f"{idle / len(history.steps):,.0f}",
                      "for the host, while there are requests")  # fmt: skip
    return table


def _kind_table(history: History) -> Table:
    table = Table(title="Steps", title_justify="left")
    table.add_column("what is in them")
    for column in ("steps", "share of time", "rows", "tokens", "ms, median", "p99", "µs a token"):
        table.add_column(column, justify="right")
    durations = _durations(history.steps)
    total = max(sum(map(sum, durations.values())), 1)
    for kind, times in durations.items():
        of_kind = [timed.step for timed in history.steps if timed.kind == kind]
        tokens = sum(step.tokens for step in of_kind)
        rows = sum(step.decodes + len(step.chunks) for step in of_kind)
        table.add_row(
            kind,
            f"{len(times):,}",
            f"{sum(times) / total:.1%}",
            f"{rows / len(times):,.1f}",
            f"{tokens / len(times):,.1f}",
            f"{statistics.median(times) / 1e3:,.2f}",
            f"{_quantile(times, 0.99) / 1e3:,.2f}",
            f"{sum(times) / max(tokens, 1):,.0f}",
        )
    failed = sum(timed.step.error is not None for timed in history.steps)
    if failed:
        table.caption = f"{failed} steps failed"
    return table


def _request_table(history: History) -> Table:
    lives = history.lives
    table = Table(title=f"Requests ({len(lives)})", title_justify="left")
    table.add_column("ms")
    for column in ("mean", "p50", "p90", "p99", "most"):
        table.add_column(column, justify="right")
    for name, values in _latencies(lives).items():
        if values:
            parts = _quantiles(values)
            table.add_row(name, *(f"{parts[key] * 1e3:,.1f}" for key in ("mean", "p50", "p90", "p99", "most")))
    got = figures(history)
    ended = ", ".join(f"{count} {reason}" for reason, count in sorted(got["ended"].items())) or "none"
    preempted = sum(bool(life.preempted_us) for life in lives)
    table.caption = (
        f"ended: {ended}; {got['prompt_tokens']:,} prompt tokens, {got['cached_tokens']:,} of them cached; "
        f"{got['tokens_generated']:,} generated; {got['preemptions']} preemptions of {preempted} requests; "
        f"at most {got['most_used_pages']:,} of {got['num_pages']:,} pages in use"
    )
    return table


def _slowest_table(history: History) -> Table:
    table = Table(title="Slowest steps", title_justify="left")
    for name in ("step", "at, s", "ms"):
        table.add_column(name, justify="right")
    for name in ("in it", "longest phase"):
        table.add_column(name)
    for timed in sorted(history.steps, key=lambda timed: -timed.duration_us)[:_NUM_SLOWEST]:
        step = timed.step
        prompt = sum(chunk.count for chunk in step.chunks)
        phase = max(step.host_us, key=lambda name: step.host_us[name], default="")
        table.add_row(
            str(step.step),
            f"{step.at_us / 1e6:.3f}",
            f"{timed.duration_us / 1e3:,.2f}",
            f"{step.decodes} decodes, {len(step.chunks)} chunks of {prompt} tokens",
            f"{phase}, {step.host_us.get(phase, 0) / 1e3:,.2f} ms",
        )
    return table


def _durations(steps: Iterable[TimedStep]) -> dict[str, list[int]]:
    """µs of the steps of each kind, the most frequent kind first."""
    found: dict[str, list[int]] = {}
    for timed in steps:
        found.setdefault(timed.kind, []).append(timed.duration_us)
    return dict(sorted(found.items(), key=lambda item: -len(item[1])))


def _latencies(lives: Sequence[Life]) -> dict[str, list[float]]:
    """Seconds, of the requests that have come so far."""
    found: dict[str, list[float]] = {"queue": [], "first token": [], "a token": [], "end to end": []}
    for life in lives:
        if life.started_us is not None:
            found["queue"].append((life.started_us - life.arrived_us) / 1e6)
        if life.first_token_us is not None and life.last_token_us is not None:
            found["first token"].append((life.first_token_us - life.arrived_us) / 1e6)
            if life.tokens > 1:
                found["a token"].append((life.last_token_us - life.first_token_us) / 1e6 / (life.tokens - 1))
        if life.ended_us is not None:
            found["end to end"].append((life.ended_us - life.arrived_us) / 1e6)
    return found


def _quantiles(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    return {
        "mean": statistics.fmean(values),
        **{f"p{round(share * 100)}": _quantile(values, share) for share in (0.5, 0.9, 0.99)},
        "most": max(values),
    }


def _quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of the values do not exceed."""
    return sorted(values)[max(math.ceil(len(values) * share), 1) - 1]
