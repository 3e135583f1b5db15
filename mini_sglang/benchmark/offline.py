"""Offline throughput on random weights: many prompts of random length at once, as nano-vllm and mini-sglang publish it.

It drives the engine itself, without text, and sets what it measured beside the hardware's floor: the bytes of weights
and KV that must be read and the FLOPs of the prompts, over ceilings that are given.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

from mini_sglang.engine import Engine
from mini_sglang.models.config import ModelConfig
from mini_sglang.request import SamplingParams


@dataclass(frozen=True)
class Workload:
    """Prompts of token ids, and how many tokens each is continued by (end tokens ignored)."""

    prompts: list[list[int]]
    output_lengths: list[int]
    temperature: float = 0.6

    @classmethod
    def random(cls, sequences: int, longest: int = 1024, shortest: int = 100, *, shift: int = 0) -> Workload:
        """Lengths uniform between `shortest` and `longest`, ids below 10,000; `shift` moves the ids, so that a second
        run finds nothing in the prefix cache.
        """
        rng = random.Random(0)
        prompts = [[rng.randint(0, 10_000) for _ in range(rng.randint(shortest, longest))] for _ in range(sequences)]
        lengths = [rng.randint(shortest, longest) for _ in range(sequences)]
        return cls([[token + shift for token in prompt] for prompt in prompts], lengths)

    @property
    def num_output_tokens(self) -> int:
        return sum(self.output_lengths)


@dataclass(frozen=True)
class Run:
    """One run: output tokens per second over the whole of it, and its steps."""

    tokens_per_second: float
    seconds: float
    steps: int


def run(engine: Engine, workload: Workload) -> Run:
    """Add every request at once and step until all have ended. Raises RuntimeError if one ends early."""
    start = time.perf_counter()
    first_step = engine.stats().num_steps
    for index, (prompt, length) in enumerate(zip(workload.prompts, workload.output_lengths, strict=True)):
        params = SamplingParams(temperature=workload.temperature, max_tokens=length, ignore_eos=True)
        engine.add_request(f"offline-{index}", prompt, params)
    tokens = 0
    while engine.has_work:
        outputs = engine.step()
        for output in outputs.others:
            if output.error is not None:
                raise RuntimeError(output.error)
        tokens += outputs.num_tokens
    seconds = time.perf_counter() - start
    if tokens != workload.num_output_tokens:
        raise RuntimeError(f"{tokens} tokens came back, {workload.num_output_tokens} were asked for")
    return Run(tokens / seconds, seconds, engine.stats().num_steps - first_step)


def floor_seconds(
    model: ModelConfig, workload: Workload, *, bytes_per_second: float, flops: float, bytes_per_value: int = 2
) -> float:
    """The least time the workload can take: weights once per step of the longest output, every decode's KV read once,
    all KV written once, over `bytes_per_second`; prompts' matrix products over `flops`.
    """
    per_layer = model.hidden_size * model.head_dim * (2 * model.num_heads + 2 * model.num_kv_heads)
    per_layer += 3 * model.hidden_size * model.intermediate_size
    in_layers = per_layer * model.num_layers
    weights = (in_layers + model.hidden_size * model.vocab_size) * bytes_per_value
    kv_per_token = 2 * model.num_layers * model.num_kv_heads * model.head_dim * bytes_per_value
    prompt_tokens = sum(len(prompt) for prompt in workload.prompts)
    kv_read = kv_written = 0
    for prompt, length in zip(workload.prompts, workload.output_lengths, strict=True):
        kv_read += sum(range(len(prompt) + 1, len(prompt) + length)) * kv_per_token
        kv_written += (len(prompt) + length) * kv_per_token
    read = weights * max(workload.output_lengths) + kv_read + kv_written
    return read / bytes_per_second + 2 * in_layers * prompt_tokens / flops
