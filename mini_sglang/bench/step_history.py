"""Reads a step log back: its steps on a time line, and the life of every request. Knows lines, no engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from mini_sglang.observability.step_log import Arrived, Chunk, Ended, Header, Line, Step, read_lines

SpanKind = Literal["prompt", "decode", "again"]  # again: computed once more after a preemption


@dataclass(slots=True)
class Span:
    """A stretch of time in which a request is part of steps. Microseconds."""

    start_us: int
    end_us: int
    tokens: int  # computed
    kind: SpanKind


@dataclass(slots=True)
class Life:
    """One request from its arrival on. Times are microseconds of the log; None: not yet, or never."""

    request_id: str
    arrived_us: int
    prompt_tokens: int
    started_us: int | None = None  # its first step was scheduled
    first_token_us: int | None = None
    last_token_us: int | None = None
    ended_us: int | None = None
    reason: str | None = None
    cached_tokens: int = 0
    tokens: int = 0  # generated
    drafted: int = 0  # tokens that steps verified
    accepted: int = 0  # of these
    decode_steps: int = 0  # that computed its newest token, with drafts or without
    preempted_us: list[int] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class TimedStep:
    """A step on the time line: from when it was scheduled, or the one before was read, until it was read."""

    step: Step
    start_us: int

    @property
    def end_us(self) -> int:
        return self.step.read_us

    @property
    def duration_us(self) -> int:
        return self.end_us - self.start_us

    @property
    def drafts(self) -> list[Chunk]:
        """The decodes that verify drafted tokens, which the log has among the chunks."""
        return [chunk for chunk in self.step.chunks if chunk.drafted]

    @property
    def chunks(self) -> list[Chunk]:
        """All other chunks."""
        return [chunk for chunk in self.step.chunks if not chunk.drafted]

    @property
    def kind(self) -> str:
        if self.chunks:
            return "chunks and decodes" if self.step.decodes or self.drafts else "chunks only"
        return "decodes with drafts" if self.drafts else "decodes only"


class History:
    """All steps and requests of a log. Raises what `read_lines` does, and ValueError if there is no step in it."""

    def __init__(self, path: str | Path) -> None:
        self.steps: list[TimedStep] = []
        self.lives: list[Life] = []
        self.idle_us = 0  # time in which there was no request
        self._by_id: dict[str, Life] = {}  # the latest of each id
        self._decode_ids: tuple[str, ...] = ()
        self._read_us = 0  # when the step before was
        self._live = 0
        self._idle_since: int | None = None
        lines = read_lines(path)
        header = next(lines, None)
        if not isinstance(header, Header):
            raise ValueError(f"{path} is not a step log: it is empty")
        self.header = header
        for line in lines:
            self._take(line)
        if not self.steps:
            raise ValueError(f"{path} holds no step: nothing has run, or not yet for a second")
        self.start_us = min([self.steps[0].step.at_us, *(life.arrived_us for life in self.lives[:1])])
        self.end_us = max([self.steps[-1].end_us, *(life.ended_us or 0 for life in self.lives)])

    @property
    def is_on_gpu(self) -> bool:
        return bool(self.header.config.get("device") != "cpu")

    def _take(self, line: Line) -> None:
        match line:
            case Arrived():
                if self._live == 0 and self._idle_since is not None:
                    self.idle_us += line.at_us - self._idle_since
                self._live += 1
                life = Life(line.request_id, line.at_us, line.prompt_tokens)
                self._by_id[line.request_id] = life
                self.lives.append(life)
            case Ended():
                life = self._by_id[line.request_id]
                life.ended_us, life.reason = line.at_us, line.reason.value
                self._live -= 1
                self._idle_since = line.at_us
            case Step():
                self._take_step(line)

    def _take_step(self, step: Step) -> None:
        timed = TimedStep(step, max(step.at_us, self._read_us))
        self.steps.append(timed)
        if step.decode_ids is not None:
            self._decode_ids = step.decode_ids
        for name in step.preempted:
            self._by_id[name].preempted_us.append(step.at_us)
        for chunk in step.chunks:
            self._take_chunk(timed, chunk)
        for name in self._decode_ids:
            self._take_row(timed, name, 1, "decode", samples=1)
        self._read_us = timed.end_us

    def _take_chunk(self, timed: TimedStep, chunk: Chunk) -> None:
        life = self._by_id[chunk.request_id]
        if life.started_us is None:
            life.started_us, life.cached_tokens = timed.step.at_us, chunk.start
        kind: SpanKind = "again" if life.preempted_us else "prompt"
        if chunk.drafted or (chunk.count == 1 and chunk.samples and chunk.start >= life.prompt_tokens):
            kind = "decode"  # with drafts, or resumed after a preemption with all but the last token cached
        if self._counts(timed, life):
            life.drafted += chunk.drafted
            life.accepted += chunk.accepted
        self._take_row(timed, chunk.request_id, chunk.count, kind, samples=chunk.samples + chunk.accepted)

    @staticmethod
    def _counts(timed: TimedStep, life: Life) -> bool:
        """Whether a row of the request is not dropped once it is computed."""
        return life.ended_us is None and timed.step.error is None

    def _take_row(self, timed: TimedStep, name: str, count: int, kind: SpanKind, *, samples: int) -> None:
        life = self._by_id[name]
        if not self._counts(timed, life):
            return
        life.decode_steps += kind == "decode"
        if samples:
            life.tokens += samples
            life.last_token_us = timed.end_us
            if life.first_token_us is None:
                life.first_token_us = timed.end_us
        last = life.spans[-1] if life.spans else None
        if kind == "decode" and last is not None and last.kind == kind and last.end_us == self._read_us:
            last.end_us = timed.end_us
            last.tokens += count
        else:
            life.spans.append(Span(timed.start_us, timed.end_us, count, kind))
