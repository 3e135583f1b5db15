"""`mini-sglang bench explain`: what a step log says about where the time went. Arithmetic over its lines, no engine."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from mini_sglang.bench.output import show, table
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
    show(tables(history), figures(history), json_path)
    if plot_path is not None:
        plot_path.write_text(draw(history, window))
        print(f"time line: {plot_path}")


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
        "drafts": _drafts(history),
        "kinds": {
            kind: {"steps": len(times), "seconds": sum(times) / 1e6, "median_s": statistics.median(times) / 1e6}
            for kind, times in _durations(steps).items()
        },
        "requests_s": {name: _quantiles(values) for name, values in _latencies(lives).items()},
        "most_used_pages": max(timed.step.used_pages for timed in steps),
        "num_pages": history.header.config["num_pages"],
    }


def tables(history: History) -> list[Table]:
    """The figures as tables; one on drafts only if there were any."""
    drafts = _drafts(history)
    of_drafts = [] if drafts is None else [_draft_table(drafts)]
    return [_place_table(history), _kind_table(history), *of_drafts, _request_table(history), _slowest_table(history)]


def _drafts(history: History) -> dict[str, Any] | None:
    """What became of drafted tokens, over all requests; None if there were none.

    `tokens_per_decode` is what a step adds to a request that it decodes, with drafts or without; 1 if none is accepted.
    """
    lives = history.lives
    drafted, accepted = sum(life.drafted for life in lives), sum(life.accepted for life in lives)
    if not drafted:
        return None
    decodes = sum(life.decode_steps for life in lives)
    return {
        "drafted_tokens": drafted,
        "accepted_tokens": accepted,
        "acceptance_rate": accepted / drafted,
        "requests": sum(life.drafted > 0 for life in lives),
        "tokens_per_decode": (decodes + accepted) / decodes,
    }


def _draft_table(drafts: Mapping[str, Any]) -> Table:
    made = table("Drafts", "requests", "tokens drafted", "accepted", "acceptance", "tokens a decode", names=False)
    made.add_row(
        f"{drafts['requests']:,}",
        f"{drafts['drafted_tokens']:,}",
        f"{drafts['accepted_tokens']:,}",
        f"{drafts['acceptance_rate']:.1%}",
        f"{drafts['tokens_per_decode']:.2f}",
    )
    made.caption = "a decode: a step's tokens of one request, with drafts or without"
    return made


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
    made = table(f"Where {total / 1e6:.3f} s went ({len(history.steps)} steps)", "", "s", "share", "µs a step")
    made.add_column()

    def add(place: str, us: int, meaning: str) -> None:
        a_step = "" if place == "no request" else f"{us / len(history.steps):,.0f}"
        made.add_row(place, f"{us / 1e6:.3f}", f"{us / total:.1%}", a_step, meaning)

    for place, us in places.items():
        add(place, us, meaning[place])
    if on_gpu:
        made.add_section()
        device = sum(timed.step.device_us or 0 for timed in history.steps)
        add("device", device, "busy with steps, beside the host's phases")
        add("device waits", max(total - places["no request"] - device, 0), "for the host, while there are requests")
    return made


def _kind_table(history: History) -> Table:
    columns = ("steps", "share of time", "rows", "tokens", "ms, median", "p99", "µs a token")
    made = table("Steps", "what is in them", *columns)
    durations = _durations(history.steps)
    total = max(sum(map(sum, durations.values())), 1)
    for kind, times in durations.items():
        of_kind = [timed.step for timed in history.steps if timed.kind == kind]
        tokens = sum(step.tokens for step in of_kind)
        rows = sum(step.decodes + len(step.chunks) for step in of_kind)
        made.add_row(
            kind,
            f"{len(times):,}",
            f"{sum(times) / total:.1%}",
            f"{rows / len(times):,.1f}",
            f"{tokens / len(times):,.1f}",
            f"{statistics.median(times) / 1e3:,.2f}",
            f"{_quantiles(times)['p99'] / 1e3:,.2f}",
            f"{sum(times) / max(tokens, 1):,.0f}",
        )
    failed = sum(timed.step.error is not None for timed in history.steps)
    if failed:
        made.caption = f"{failed} steps failed"
    return made


def _request_table(history: History) -> Table:
    lives = history.lives
    made = table(f"Requests ({len(lives)})", "ms", "mean", "p50", "p90", "p99", "most")
    for name, values in _latencies(lives).items():
        if values:
            made.add_row(name, *(f"{part * 1e3:,.1f}" for part in _quantiles(values).values()))
    got = figures(history)
    ended = ", ".join(f"{count} {reason}" for reason, count in sorted(got["ended"].items())) or "none"
    preempted = sum(bool(life.preempted_us) for life in lives)
    made.caption = (
        f"ended: {ended}; {got['prompt_tokens']:,} prompt tokens, {got['cached_tokens']:,} of them cached; "
        f"{got['tokens_generated']:,} generated; {got['preemptions']} preemptions of {preempted} requests; "
        f"at most {got['most_used_pages']:,} of {got['num_pages']:,} pages in use"
    )
    return made


def _slowest_table(history: History) -> Table:
    made = table("Slowest steps", "step", "at, s", "ms", names=False)
    made.add_column("in it")
    made.add_column("longest phase")
    for timed in sorted(history.steps, key=lambda timed: -timed.duration_us)[:_NUM_SLOWEST]:
        step = timed.step
        prompt, verified = (sum(chunk.count for chunk in of) for of in (timed.chunks, timed.drafts))
        drafts = f", {len(timed.drafts)} decodes with drafts of {verified} tokens" if timed.drafts else ""
        phase = max(step.host_us, key=lambda name: step.host_us[name], default="")
        made.add_row(
            str(step.step),
            f"{step.at_us / 1e6:.3f}",
            f"{timed.duration_us / 1e3:,.2f}",
            f"{step.decodes} decodes, {len(timed.chunks)} chunks of {prompt} tokens{drafts}",
            f"{phase}, {step.host_us.get(phase, 0) / 1e3:,.2f} ms",
        )
    return made


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
    """Each percentile is the smallest value that at least this share of the values do not exceed."""
    if not values:
        return {}
    p50, p90, p99 = np.quantile(values, (0.5, 0.9, 0.99), method="inverted_cdf").tolist()
    return {"mean": statistics.fmean(values), "p50": p50, "p90": p90, "p99": p99, "most": max(values)}
