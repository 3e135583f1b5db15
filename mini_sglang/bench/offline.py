"""Offline throughput: many prompts of random length at once, as nano-vllm and mini-sglang publish it.

It drives the engine itself, without text. Throughput is reported beside the bytes and FLOPs that the workload cannot
avoid (`roofline.py`), the host's time per step and, on a GPU, a profile of the device's time.
"""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from mini_sglang.bench.acceptance import Acceptance
from mini_sglang.bench.hardware import torch_dtype
from mini_sglang.bench.host_time import HostTime, host_time, most_at_once
from mini_sglang.bench.output import progress_bar
from mini_sglang.bench.profile import Profile, StepProfiler
from mini_sglang.bench.roofline import Traffic
from mini_sglang.engine import Engine
from mini_sglang.sampling_params import SamplingParams

# Of a weight in the layers, without scales.
_QUANTIZED_BYTES = {"fp8": 1.0, "fp8-block": 1.0, "w4a16": 0.5}


@dataclass(frozen=True)
class Workload:
    """Prompts of token ids, and how many tokens each is continued by (end tokens ignored)."""

    prompts: list[list[int]]
    output_lengths: list[int]
    temperature: float = 0.6

    @classmethod
    def random(cls, sequences: int, longest: int = 1024, shortest: int = 100) -> Workload:
        """Lengths uniform between `shortest` and `longest`, ids up to 10,000, always the same.

        Raises ValueError if `shortest` is longer.
        """
        if shortest > longest:
            raise ValueError(f"shortest must be at most longest, got {shortest} and {longest}")
        rng = random.Random(0)
        prompts = [[rng.randint(0, 10_000) for _ in range(rng.randint(shortest, longest))] for _ in range(sequences)]
        return cls(prompts, [rng.randint(shortest, longest) for _ in range(sequences)])

    @classmethod
    def streams(cls, batch: int, input: int, output: int) -> Workload:
        """`batch` sequences of `input` prompt tokens and `output` more."""
        rng = random.Random(0)
        return cls([[rng.randint(0, 10_000) for _ in range(input)] for _ in range(batch)], [output] * batch)

    def shifted(self, shift: int, vocab_size: int) -> Workload:
        """The same lengths with other ids of the vocabulary: a second run finds nothing in the prefix cache."""
        prompts = [[(token + shift) % vocab_size for token in prompt] for prompt in self.prompts]
        return dataclasses.replace(self, prompts=prompts)

    @property
    def num_output_tokens(self) -> int:
        return sum(self.output_lengths)

    def add_to(self, engine: Engine) -> list[str]:
        """Queue every sequence; returns the request ids. Raises ValueError if the engine cannot hold the longest."""
        self._check_fits(engine)
        ids = [f"bench-{index}" for index in range(len(self.prompts))]
        for request_id, prompt, length in zip(ids, self.prompts, self.output_lengths, strict=True):
            params = SamplingParams(temperature=self.temperature, max_tokens=length, ignore_eos=True)
            engine.add_request(request_id, prompt, params)
        return ids

    def _check_fits(self, engine: Engine) -> None:
        longest = max(map(sum, zip(map(len, self.prompts), self.output_lengths, strict=True)))
        most, room = engine.model_config.context_length, engine.stats().num_pages * engine.config.page_size
        if longest > most:
            raise ValueError(f"context_length must be at least {longest}, the workload's longest sequence, got {most}")
        if longest > room + 1:  # what is sampled last needs no place
            raise ValueError(
                f"the KV cache holds {room} tokens, the workload's longest sequence has {longest}: raise num_pages, "
                "kv_cache_bytes (on a CPU) or mem_fraction (on a GPU)"
            )

    def traffic(self, engine: Engine) -> Traffic:
        """What the engine's model, in its dtypes, has to move and multiply for it."""
        lengths = [len(prompt) for prompt in self.prompts]
        itemsize = torch_dtype(engine.config.dtype).itemsize
        return Traffic.of(
            engine.model_config,
            lengths,
            self.output_lengths,
            weight_bytes=_QUANTIZED_BYTES.get(engine.config.quantization, itemsize),
            kv_bytes=1 if engine.config.kv_cache_dtype == "fp8" else itemsize,
            head_bytes=itemsize,
        )


@dataclass(frozen=True)
class Run:
    """One run: output tokens per second over the whole of it, and its steps."""

    tokens_per_second: float
    seconds: float
    steps: int
    drafts: Acceptance | None = None  # None: nothing was drafted


@dataclass(frozen=True)
class Offline:
    """All runs, of which the fastest counts, and the profile of another one at its start and in its middle."""

    runs: list[Run]
    host: list[HostTime]
    profiles: list[Profile]  # empty, or start and middle

    @property
    def best(self) -> Run:
        return max(self.runs, key=lambda run: run.tokens_per_second)

    @property
    def idle_share(self) -> float | None:
        """Of the run's time, how much the device does nothing, the moments between two kernels of a graph included."""
        return self._of_whole_run([profile.idle_share for profile in self.profiles])

    @property
    def host_gap_share(self) -> float | None:
        """Of the run's time, how much the device waits for the host."""
        return self._of_whole_run([profile.host_gaps_ms / profile.elapsed_ms for profile in self.profiles])

    def _of_whole_run(self, shares: list[float]) -> float | None:
        """Shares of both windows to one of the run: the start as it was seen, the rest like the middle."""
        if not shares:
            return None
        at_start = min(self.profiles[0].elapsed_ms / 1e3 / self.best.seconds, 1.0)
        return at_start * shares[0] + (1 - at_start) * shares[-1]


def measure_offline(engine: Engine, workload: Workload, *, runs: int = 2, profile_steps: int = 0) -> Offline:
    """A warm-up, then `runs` runs with other ids, then the host's time with 16 and with the most running requests.

    `profile_steps` above 0 adds a run in which that many steps are profiled at its start and in its middle (GPU only).
    """
    vocab_size = engine.model_config.vocab_size
    _, *measured = [run(engine, workload.shifted(index, vocab_size)) for index in run_numbers(runs)]
    most = min(most_at_once(engine), len(workload.prompts))
    host = [host_time(engine, running) for running in sorted({min(16, most), most})]
    profiles: list[Profile] = []
    if profile_steps:  # last, since the tracer slows down what the host does after it
        middle = max(1, measured[0].steps // 2)  # a run may be a single step, which is its start
        profiler = StepProfiler({"start": 0, "middle": middle}, min(profile_steps, middle))
        run(engine, workload.shifted(runs + 1, vocab_size), before_step=profiler)
        profiler.finish()
        profiles = profiler.profiles
    return Offline(measured, host, profiles)


def run_numbers(runs: int) -> Iterator[int]:
    """Numbers of a warm-up, 0, and of `runs` runs behind it, with a bar that moves between runs."""
    with progress_bar() as bar:
        yield from bar.track(range(runs + 1), description="Warm-up, then runs")


def run(engine: Engine, workload: Workload, *, before_step: Callable[[int], None] | None = None) -> Run:
    """Add every request at once and step until all have ended. Raises RuntimeError if one ends early."""
    start = time.perf_counter()
    before = engine.stats()
    workload.add_to(engine)
    tokens = calls = 0
    while engine.has_work:
        if before_step is not None:
            before_step(calls)
        calls += 1
        outputs = engine.step()
        for output in outputs.others:
            if output.error is not None:
                raise RuntimeError(output.error)
        tokens += outputs.num_tokens
    seconds = time.perf_counter() - start
    if tokens != workload.num_output_tokens:
        raise RuntimeError(f"{tokens} tokens came back, {workload.num_output_tokens} were asked for")
    after = engine.stats()
    drafts = Acceptance.between(before.drafts, after.drafts)
    return Run(tokens / seconds, seconds, after.num_steps - before.num_steps, drafts)
