"""What a replica's steps take: fitted to a step log or to `bench latency`, and kept as a small file of JSON.

The device's time is a sum of `StepCost`'s five parts and one for decodes that run beside prompts; the host's, which a
step in flight hides, has three. Microseconds throughout. Knows step logs and settings, and no scheduler.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from mini_sglang.config import ResolvedConfig
from mini_sglang.observability.step_log import Arrived, Ended, Header, Step, read_lines
from mini_sglang.scheduling.step_cost import StepCost, Work
from mini_sglang.simulate.settings import SETTINGS

Array = np.ndarray[Any, Any]
FEWEST_STEPS = 30  # of a log that a fit needs
FEWEST_POINTS = 3  # files of `bench latency` that one needs
_LEAST_US = 1e-9  # of a part: StepCost wants none to be 0
_MOST_OFF = 0.5  # of a step: more was something else's fault
_ROUNDS = 4  # of weighting a fit's errors


class DeviceTimes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of a step: for itself, and for one of each part of `Work`; `beside` for each decode of a step with prompts."""

    step: float
    decode: float
    context: float
    token: float
    pair: float
    beside: float = 0.0


class HostTimes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of a step: for itself, for a decode, and for a token of a prompt."""

    step: float = 0.0
    decode: float = 0.0
    token: float = 0.0


class ReplicaCost(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Times of a replica, and its engine's settings as far as the scheduler reads them."""

    settings: dict[str, Any]
    device_us: DeviceTimes
    host_us: HostTimes = HostTimes()
    request_us: float = 0.0  # for a request and its answer outside of the engine
    spread: float = 0.0  # standard deviation of the device's time, as a share of what is expected

    @property
    def config(self) -> ResolvedConfig:
        """Settings of an engine that has no model. Raises ValueError for settings that make none."""
        if unknown := sorted(self.settings.keys() - set(SETTINGS)):
            raise ValueError(f"settings of a replica are {', '.join(SETTINGS)}, got {unknown[0]}")
        try:
            return ResolvedConfig(**self.settings)
        except TypeError as error:
            raise ValueError(f"settings of a replica are not complete: {error}") from None

    def with_settings(self, changes: dict[str, Any]) -> ReplicaCost:
        """The same times with some settings changed."""
        return msgspec.structs.replace(self, settings={**self.settings, **changes})

    def step_cost(self) -> StepCost:
        """What a scheduler expects of steps in the beginning."""
        times = self.device_us
        parts = (times.step, times.decode, times.context, times.token, times.pair)
        return StepCost(*(max(us, _LEAST_US) for us in parts))

    def device_step_us(self, work: Work) -> float:
        times = self.device_us
        us = times.step + work.decodes * times.decode + work.context * times.context
        if work.tokens:
            us += work.tokens * times.token + work.pairs * times.pair + work.decodes * times.beside
        return us

    def host_step_us(self, work: Work) -> float:
        times = self.host_us
        return times.step + work.decodes * times.decode + work.tokens * times.token

    def save(self, path: Path) -> None:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n")


def load_cost(path: Path) -> ReplicaCost:
    """Raises OSError, and ValueError if the file holds no cost."""
    try:
        cost = msgspec.json.decode(path.read_bytes(), type=ReplicaCost)
    except msgspec.DecodeError as error:
        raise ValueError(f"{path} holds no cost of a replica: {error}") from None
    cost.config  # noqa: B018  # raises if the settings are wrong
    return cost


class Fit(NamedTuple):
    """A cost, and how far its steps were from those of the log."""

    cost: ReplicaCost
    num_steps: int
    total: float  # time of all steps as predicted, by what they took
    median_error: float  # of a step, as a share of what it took


def fit_cost(path: Path) -> Fit:
    """The times of the steps of a log, by non-negative least squares.

    Raises OSError, and ValueError for a file that is no log, or one of fewer than `FEWEST_STEPS` steps.
    """
    reader = _LogReader(path)
    work, device, host = (np.array(column, float) for column in (reader.work, reader.device_us, reader.host_us))
    if len(work) < FEWEST_STEPS:
        raise ValueError(f"{path} has {len(work)} steps that follow another one; a fit needs {FEWEST_STEPS}")
    taken = device + host
    beside = np.where(work[:, 3] > 0, work[:, 1], 0)
    for_device, for_host = np.column_stack([work, beside]), work[:, [0, 1, 3]]
    device_us, host_us = _fit(for_device, device), _fit(for_host, host)
    predicted = for_device @ device_us + for_host @ host_us
    settings = _settings(path, reader.header.config)
    off = np.clip(device / (for_device @ device_us) - 1, -_MOST_OFF, _MOST_OFF)
    cost = ReplicaCost(
        settings, DeviceTimes(*device_us.tolist()), HostTimes(*host_us.tolist()), spread=float(off.std())
    )
    errors = np.abs(predicted / taken - 1)
    return Fit(cost, len(work), float(predicted.sum() / taken.sum()), float(np.median(errors)))


class _Streams(msgspec.Struct):
    """What `bench latency` writes, as far as it is read here."""

    batch: int
    input: int
    output: int
    first_token_ms: float
    token_ms_median: float
    config: dict[str, Any]


def fit_latency(paths: Sequence[Path]) -> Fit:
    """The times that give what several runs of `bench latency` have measured: prompts of streams that start together,
    and their decodes. The host's time is in the device's.

    Raises OSError, and ValueError for a file that is none of its, or fewer than three.
    """
    if len(paths) < FEWEST_POINTS:
        raise ValueError(f"a fit needs {FEWEST_POINTS} files of bench latency, of different sizes; got {len(paths)}")
    work, taken = [], []
    for path in paths:
        try:
            streams = msgspec.json.decode(path.read_bytes(), type=_Streams)
        except msgspec.DecodeError as error:
            raise ValueError(f"{path} is not what bench latency --json writes: {error}") from None
        settings = _settings(path, streams.config)
        budget = int(settings["max_prefill_tokens"])
        steps = -(-((streams.batch - 1) // 2 + 1) * streams.input // budget)  # until the median stream's first token
        tokens = min(streams.batch * streams.input, steps * budget)
        work.append(Work(steps, 0, 0, tokens, tokens * (streams.input + 1) // 2))
        context = streams.batch * (streams.input + streams.output // 2)
        work.append(Work(1, streams.batch, context, 0, 0))
        taken += [streams.first_token_ms * 1e3, streams.token_ms_median * 1e3]
    parts, times = np.array(work, float), np.array(taken)
    device_us = _fit(parts, times)
    predicted = parts @ device_us
    errors = np.abs(predicted / times - 1)
    return Fit(
        ReplicaCost(settings, DeviceTimes(*device_us.tolist())),
        len(times),
        float(predicted.sum() / times.sum()),
        float(np.median(errors)),
    )


def _settings(path: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Those of an engine's settings that count. Raises ValueError if one is missing."""
    if missing := [name for name in SETTINGS if name not in config]:
        raise ValueError(f"{path} does not say what {missing[0]} was, so it is of another version")
    return {name: config[name] for name in SETTINGS}


class _LogReader:
    """The steps of a log that came while another one ran or right after it: what they computed and took."""

    def __init__(self, path: Path) -> None:
        lines = read_lines(path)
        header = next(lines, None)
        if not isinstance(header, Header):
            raise ValueError(f"{path} is not a step log: it is empty")
        self.header = header
        self.work: list[Work] = []
        self.device_us: list[int] = []
        self.host_us: list[int] = []
        self._positions: dict[str, int] = {}  # of the next token that each request computes
        self._decode_ids: tuple[str, ...] = ()
        self._num_live = 0
        self._was_idle = True  # since the step before
        self._reads_us = [0, 0]  # when the last two steps were read
        for line in lines:
            match line:
                case Arrived():
                    self._num_live += 1
                case Ended():
                    self._num_live -= 1
                    self._was_idle = self._was_idle or self._num_live == 0
                case Step():
                    self._take(line)

    def _take(self, step: Step) -> None:
        if step.decode_ids is not None:
            self._decode_ids = step.decode_ids
        work = self._work_of(step)
        read_us = max((us for us in self._reads_us if us <= step.at_us), default=step.at_us)
        if not self._was_idle and step.error is None:
            phases = step.host_us
            computed_us = phases["launch"] + phases["wait"]
            between_us = step.at_us - read_us
            host_us = between_us + phases["schedule"] + phases["update"]
            if step.device_us is not None:
                computed_us, host_us = step.device_us, host_us + phases["launch"]
            self.work.append(work)
            self.device_us.append(max(computed_us, 1))
            self.host_us.append(max(host_us, 1))
        self._was_idle = False
        self._reads_us = [self._reads_us[1], step.read_us]

    def _work_of(self, step: Step) -> Work:
        positions = self._positions
        decodes, context, tokens, pairs = len(self._decode_ids), 0, 0, 0
        for name in self._decode_ids:
            context += positions[name]
            positions[name] += 1
        for chunk in step.chunks:
            if chunk.count == 1:
                decodes, context = decodes + 1, context + chunk.start
            else:
                tokens += chunk.count
                pairs += chunk.count * chunk.start + chunk.count * (chunk.count + 1) // 2
            positions[chunk.request_id] = chunk.start + chunk.count
        return Work(1, decodes, context, tokens, pairs)


def _fit(parts: Array, taken: Array) -> Array:
    """What one of each part takes, float64 [parts], none below 0, given steps' parts [steps, parts] and times [steps].

    Squared errors are divided by what is predicted. So long steps do not outweigh short ones, and all steps together
    take as long as they took.
    """
    expected = taken
    found = np.zeros(parts.shape[1])
    for _ in range(_ROUNDS):
        weights = 1 / np.sqrt(expected)
        found = _non_negative_least_squares(parts * weights[:, None], taken * weights)
        expected = np.maximum(parts @ found, np.median(taken) / 100)
    return found


def _non_negative_least_squares(matrix: Array, wanted: Array) -> Array:
    """The x >= 0 that minimises |matrix @ x - wanted|: Lawson and Hanson's active sets (1974)."""
    scale = np.linalg.norm(matrix, axis=0)
    scale[scale == 0] = 1.0
    matrix = matrix / scale
    num_columns = matrix.shape[1]
    x, free = np.zeros(num_columns), np.zeros(num_columns, bool)
    for _ in range(3 * num_columns):
        gradient = np.where(free, 0.0, matrix.T @ (wanted - matrix @ x))
        if gradient.max() <= 1e-10 * np.linalg.norm(wanted):
            break
        free[int(gradient.argmax())] = True
        while True:
            trial = np.zeros(num_columns)
            trial[free] = np.linalg.lstsq(matrix[:, free], wanted, rcond=None)[0]
            if (trial[free] > 0).all():
                break
            below = free & (trial <= 0)
            x = x + (x[below] / (x[below] - trial[below])).min() * (trial - x)
            free &= x > 1e-12
        x = trial
    found: Array = x / scale
    return found
