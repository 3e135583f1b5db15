"""A device in simulated time: it stands where an engine's executor stands, and says what would have happened when.

Steps are computed at once by the real executor behind it. How long they take, and what the host is busy with, is
counted in milliseconds of a clock that nobody waits for. Used by check.py and play.py of this lesson.
"""

from __future__ import annotations

import itertools
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mini_sglang.config import EngineConfig
from mini_sglang.engine import Engine
from mini_sglang.execution.executor import Executor, StepHandle
from mini_sglang.outputs import StepOutputs
from mini_sglang.sampling_params import SamplingParams
from mini_sglang.scheduling.batch import ScheduledBatch, StepResult


@dataclass(frozen=True)
class Span:
    """Who is busy with a step, from when to when."""

    who: str  # "launch" and "read" keep the host busy, "wait" is the host doing nothing, "device" is the device
    step: int
    begin: float  # ms
    end: float


class SimulatedDevice:
    """Runs one step at a time, in the order of their launches, `step_ms` each.

    Scheduling and launching a step takes the host `launch_ms`, reading its tokens and updating `read_ms`.
    """

    def __init__(
        self, executor: Executor, *, step_ms: float = 10.0, launch_ms: float = 4.0, read_ms: float = 2.0
    ) -> None:
        self._executor = executor
        self.step_ms, self.launch_ms, self.read_ms = step_ms, launch_ms, read_ms
        self.now = 0.0  # where the host is
        self.free_at = 0.0  # when the device has done all that was queued
        self.spans: list[Span] = []
        self.fail_launch_of: int | None = None
        self.fail_read_of: int | None = None

    def launch(self, batch: ScheduledBatch) -> SimulatedHandle:
        if batch.step == self.fail_launch_of:
            raise RuntimeError(f"step {batch.step} cannot be launched")
        self._spend("launch", batch.step, self.launch_ms)
        begin = max(self.now, self.free_at)
        self.free_at = begin + self.step_ms
        self.spans.append(Span("device", batch.step, begin, self.free_at))
        return SimulatedHandle(self, batch.step, self._executor.launch(batch), self.free_at)

    def read(self, step: int, done_at: float) -> None:
        if step == self.fail_read_of:
            raise RuntimeError(f"step {step} cannot be read")
        if done_at > self.now:
            self._spend("wait", step, done_at - self.now)
        self._spend("read", step, self.read_ms)

    def _spend(self, what: str, step: int, ms: float) -> None:
        self.spans.append(Span(what, step, self.now, self.now + ms))
        self.now += ms

    def order(self) -> list[str]:
        """What the host did, in order: "launch 1", "read 1", ..."""
        return [f"{span.who} {span.step}" for span in self.spans if span.who in ("launch", "read")]

    def idle_ms(self) -> float:
        """How long the device had nothing to do between its first step and its last."""
        steps = [span for span in self.spans if span.who == "device"]
        return sum(later.begin - earlier.end for earlier, later in itertools.pairwise(steps))

    def close(self) -> None:
        self._executor.close()


class SimulatedHandle:
    """A launched step, whose tokens may be read from `done_at` on."""

    def __init__(self, device: SimulatedDevice, step: int, handle: StepHandle, done_at: float) -> None:
        self._device, self._step, self._handle, self._done_at = device, step, handle, done_at
        self.device_us = round(device.step_ms * 1000)

    def result(self) -> StepResult:
        self._device.read(self._step, self._done_at)
        return self._handle.result()


def simulated_engine(run_ahead: int, **times: float) -> tuple[Engine, SimulatedDevice]:
    """The engine with a tiny random model on a simulated device."""
    shape: dict[str, Any] = {
        "model_type": "llama",
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 128,
    }
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(shape))
        config = EngineConfig(
            model=folder,
            load_format="dummy",
            device="cpu",
            dtype="float32",
            attention_backend="reference",
            num_pages=64,
            max_running_requests=8,
            num_threads=1,
            run_ahead=run_ahead,
        )
        engine = Engine(config)
    device = SimulatedDevice(engine.executor, **times)
    engine.executor = device  # type: ignore[assignment]  # it has what the engine calls
    return engine, device


def add_request(engine: Engine, request_id: str, *, tokens: int) -> None:
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    engine.add_request(request_id, [5, 6, 7, 8], params)


def tokens_of(outputs: StepOutputs) -> int:
    """How many tokens a step brought."""
    return len(outputs.token_ids) + sum(len(output.token_ids) for output in outputs.others)
