"""The time line of a step log as SVG: requests as lanes, above them the tokens of each step and the pages in use."""

from __future__ import annotations

import math
from collections.abc import Iterator
from xml.sax.saxutils import escape

from mini_sglang.bench.step_history import History, Life, TimedStep

Window = tuple[float, float | None]  # seconds of the log, up to its end if None

_WIDTH, _LEFT, _RIGHT = 1400, 170, 20
_LANE, _BAR = 16, 10
_PANEL = 60  # height
_COLOURS = {
    "queue": "#d5d8dc",
    "prompt": "#e58a2b",
    "decode": "#3b7dd8",
    "again": "#a8481a",
    "preempted": "#d62728",
    "pages": "#8fbf8f",
}
_LEGEND = {
    "queue": "queued",
    "prompt": "prompt chunk",
    "decode": "decode",
    "preempted": "preempted, waiting",
    "again": "computed again",
    "pages": "pages in use",
}
_END_COLOURS = {"stop": "#222222", "length": "#222222", "abort": "#999999", "error": "#d62728"}
_ID_LENGTH = 20


def draw(history: History, window: Window = (0.0, None), max_lanes: int = 200) -> str:
    """The SVG document. `window` counts from the first line on. Raises ValueError if it holds nothing.

    Of more than `max_lanes` requests in the window the first are drawn, which the drawing says.
    """
    last = (history.end_us - history.start_us) / 1e6
    start, end = window[0], last if window[1] is None else min(window[1], last)
    if not 0 <= start < end:  # which not-a-number is not either
        raise ValueError(f"the window must lie between 0 and {last:g} s and begin before it ends, got {window}")
    start_us = history.start_us + round(start * 1e6)
    end_us = max(history.start_us + round(end * 1e6), start_us + 1)
    lives = [life for life in history.lives if life.arrived_us < end_us and _last_us(life, history) > start_us]
    scale = _Scale(start_us, end_us)
    lanes_top = 60 + 2 * (_PANEL + 24)
    height = lanes_top + _LANE * len(lives[:max_lanes]) + 40
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
        f'viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif" font-size="11">',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        *_legend(_title(history, lives, max_lanes)),
        *_axis(scale, history.start_us, 60, height - 30),
        *_tokens_panel(history, scale, 60),
        *_pages_panel(history, scale, 60 + _PANEL + 24),
    ]
    for index, life in enumerate(lives[:max_lanes]):
        parts += _lane(life, scale, lanes_top + _LANE * index, _last_us(life, history))
    return "\n".join([*parts, "</svg>", ""])


class _Scale:
    """Microseconds to horizontal places."""

    def __init__(self, start_us: int, end_us: int) -> None:
        self.start_us, self.end_us = start_us, end_us
        self._per_us = (_WIDTH - _LEFT - _RIGHT) / (end_us - start_us)

    def x(self, us: float) -> float:
        return _LEFT + (min(max(us, self.start_us), self.end_us) - self.start_us) * self._per_us

    def shows(self, start_us: float, end_us: float) -> bool:
        return end_us >= self.start_us and start_us <= self.end_us


def _last_us(life: Life, history: History) -> int:
    return history.end_us if life.ended_us is None else life.ended_us


def _title(history: History, lives: list[Life], max_lanes: int) -> str:
    config = history.header.config
    shown = f"{len(lives)} requests" if len(lives) <= max_lanes else f"the first {max_lanes} of {len(lives)} requests"
    return f"{config['model']} on {config['device']}: {shown}, {len(history.steps)} steps in the log"


def _legend(title: str) -> Iterator[str]:
    yield f'<text x="12" y="20" font-size="14" font-weight="bold">{escape(title)}</text>'
    x = _LEFT
    for name, label in _LEGEND.items():
        yield f'<rect x="{x}" y="31" width="14" height="10" fill="{_COLOURS[name]}"/>'
        yield f'<text x="{x + 19}" y="40">{label}</text>'
        x += 40 + 7 * len(label)


def _axis(scale: _Scale, origin_us: int, top: float, bottom: float) -> Iterator[str]:
    """A line at every round time, counted from the first line of the log."""
    span = scale.end_us - scale.start_us
    power = 10 ** math.floor(math.log10(max(span / 10, 1)))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= span / 12)
    in_ms = span < 2_000_000
    at = origin_us + math.ceil((scale.start_us - origin_us) / step) * step
    while at <= scale.end_us:
        x, seconds = scale.x(at), (at - origin_us) / 1e6
        label = f"{seconds * 1e3:g} ms" if in_ms else f"{seconds:g} s"
        yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{bottom}" stroke="#eeeeee"/>'
        yield f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle" fill="#666666">{label}</text>'
        at += step


def _tokens_panel(history: History, scale: _Scale, top: float) -> Iterator[str]:
    """Tokens of each step, chunks upon decodes with their drafts; steps that share a pixel show the one with most."""
    columns: dict[int, TimedStep] = {}
    for timed in history.steps:
        if scale.shows(timed.start_us, timed.end_us):
            column = int(scale.x(timed.start_us))
            if column not in columns or columns[column].step.tokens < timed.step.tokens:
                columns[column] = timed
    most_tokens = max((timed.step.tokens for timed in columns.values()), default=0) or 1
    yield _panel_label("tokens a step", most_tokens, top)
    for timed in columns.values():
        x, right, step = scale.x(timed.start_us), scale.x(timed.end_us), timed.step
        decoded = step.tokens - sum(chunk.count for chunk in timed.chunks)
        for name, low, high in (("decode", 0, decoded), ("prompt", decoded, step.tokens)):
            y, height = top + _PANEL * (1 - high / most_tokens), _PANEL * (high - low) / most_tokens
            if height:
                yield _rect(x, y, max(right - x, 1.0), height, _COLOURS[name])


def _pages_panel(history: History, scale: _Scale, top: float) -> Iterator[str]:
    num_pages = int(history.header.config["num_pages"])
    yield _panel_label("pages in use", num_pages, top)
    bottom = top + _PANEL
    points, column, drawn_to = [f"{_LEFT:.1f},{bottom:.1f}"], -1, float(_LEFT)
    for timed in history.steps:
        x, right = scale.x(timed.start_us), scale.x(timed.end_us)
        if scale.shows(timed.start_us, timed.end_us) and int(x) != column:
            if x - drawn_to > 1:  # nothing ran in between
                points += [f"{drawn_to:.1f},{bottom:.1f}", f"{x:.1f},{bottom:.1f}"]
            y = bottom - _PANEL * timed.step.used_pages / num_pages
            points += [f"{x:.1f},{y:.1f}", f"{right:.1f},{y:.1f}"]
            column, drawn_to = int(x), right
    points.append(f"{drawn_to:.1f},{bottom:.1f}")
    yield f'<polygon points="{" ".join(points)}" fill="{_COLOURS["pages"]}"/>'


def _panel_label(text: str, most: int, top: float) -> str:
    return (
        f'<rect x="{_LEFT}" y="{top}" width="{_WIDTH - _LEFT - _RIGHT}" height="{_PANEL}" fill="none" '
        f'stroke="#cccccc"/><text x="{_LEFT - 8}" y="{top + 11}" text-anchor="end">{most:,}</text>'
        f'<text x="{_LEFT - 8}" y="{top + _PANEL / 2 + 8}" text-anchor="end" fill="#666666">{text}</text>'
    )


def _lane(life: Life, scale: _Scale, top: float, last_us: int) -> Iterator[str]:
    name = life.request_id if len(life.request_id) <= _ID_LENGTH else f"{life.request_id[: _ID_LENGTH - 1]}…"
    yield f'<text x="{_LEFT - 8}" y="{top + _BAR}" text-anchor="end">{escape(name)}</text>'
    start_us = last_us if life.started_us is None else life.started_us
    if scale.shows(life.arrived_us, start_us):
        yield _bar(
            scale, top, life.arrived_us, start_us, "queue", f"queued for {(start_us - life.arrived_us) / 1e3:g} ms"
        )
    for at in life.preempted_us:
        back_us = min((span.start_us for span in life.spans if span.start_us >= at), default=last_us)
        if scale.shows(at, back_us):
            yield _bar(scale, top, at, back_us, "preempted", f"preempted for {(back_us - at) / 1e3:g} ms")
    for span in life.spans:
        if scale.shows(span.start_us, span.end_us):
            text = f"{_LEGEND[span.kind]}: {span.tokens} tokens, {(span.end_us - span.start_us) / 1e3:g} ms"
            yield _bar(scale, top, span.start_us, span.end_us, span.kind, text)
    if life.ended_us is not None and scale.shows(life.ended_us, life.ended_us):
        x, colour = scale.x(life.ended_us), _END_COLOURS.get(life.reason or "", "#222222")
        drafts = f", {life.accepted} of {life.drafted} drafted accepted" if life.drafted else ""
        yield (
            f'<rect x="{x - 1:.1f}" y="{top - 2}" width="2" height="{_BAR + 4}" fill="{colour}">'
            f"<title>{escape(life.request_id)}: {life.reason}, {life.tokens} tokens{drafts}</title></rect>"
        )


def _bar(scale: _Scale, top: float, start_us: int, end_us: int, name: str, text: str) -> str:
    """Waiting is a thin bar, computing a thick one, with a narrow gap between one chunk and the next."""
    x, right = scale.x(start_us), scale.x(end_us)
    is_thin = name in ("queue", "preempted")
    y, height = (top + _BAR / 2 - 1.5, 3) if is_thin else (top, _BAR)
    width = right - x - (0.6 if right - x > 2 else 0)
    return _rect(x, y, width, height, _COLOURS[name], text)


def _rect(x: float, y: float, width: float, height: float, colour: str, text: str = "") -> str:
    shape = f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.5):.1f}" height="{height:.1f}" fill="{colour}"'
    return f"{shape}><title>{escape(text)}</title></rect>" if text else f"{shape}/>"
