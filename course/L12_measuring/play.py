"""The floor of this machine for the built-in model; and goodput under load, by the real scheduler on a GPU's clock.

The second part takes a step to last as long as an H100's data sheet allows for the weights and products of Qwen3-8B.
"""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Sequence

import torch
from rich.console import Console
from rich.table import Table

from mini_sglang.bench.hardware import measure_ceilings
from mini_sglang.bench.roofline import Ceilings, Traffic, num_weights
from mini_sglang.config import ResolvedConfig
from mini_sglang.model_config import ModelConfig
from mini_sglang.request import Request
from mini_sglang.sampling_params import SamplingParams
from mini_sglang.scheduling.simulation import Simulation

SMOLLM2 = ModelConfig(
    architecture="llama", vocab_size=49152, hidden_size=576, intermediate_size=1536, num_layers=30, num_heads=9,
    num_kv_heads=3, head_dim=64, context_length=8192, rms_norm_eps=1e-5, rope_theta=100000.0,
)  # fmt: skip
QWEN3_8B = ModelConfig(
    architecture="qwen3", vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_layers=36, num_heads=32,
    num_kv_heads=8, head_dim=128, context_length=40960, rms_norm_eps=1e-6, rope_theta=1000000.0,
)  # fmt: skip
H100 = Ceilings(bytes_per_second=3.35e12, flops_per_second=989e12)  # SXM, bfloat16 without sparsity
PROMPT, OUTPUT, REQUESTS = 800, 60, 70
GOOD_FIRST_S, GOOD_GAP_S = 0.1, 0.012  # a good request: first token, and mean time between tokens
RATES = (20, 60, 80, 100)  # requests a second


def main() -> None:
    console = Console()
    ceilings = measure_ceilings(torch.device("cpu"), torch.float32)
    console.print(
        f"This machine at best: copies {ceilings.bytes_per_second / 1e9:.1f} GB/s (read plus written), "
        f"multiplies {ceilings.flops_per_second / 1e9:.0f} GFLOP/s in float32\n"
    )
    console.print(_floors(ceilings))
    console.print()
    console.print(_goodput())
    console.print("[dim]Throughput still rises where goodput falls: the device is busy being late.[/]")


def _floors(ceilings: Ceilings) -> Table:
    prompt, output, value_bytes = 200, 40, 4  # float32
    table = Table(title=f"Floors for {prompt} + {output} tokens", title_justify="left", box=None, padding=(0, 2, 0, 0))
    for column in ("streams", "weights read", "KV read", "prompts' products", "floor", "tokens/s at most"):
        table.add_column(column, justify="right")
    for streams in (1, 4, 16, 64):
        lengths = [prompt] * streams, [output] * streams
        traffic = Traffic.of(SMOLLM2, *lengths, weight_bytes=value_bytes, kv_bytes=value_bytes)
        seconds = traffic.floor_seconds(ceilings)
        table.add_row(
            str(streams),
            f"{traffic.weight_bytes / 1e9:.1f} GB",
            f"{traffic.kv_read_bytes / 1e9:.2f} GB",
            f"{traffic.prompt_flops / 1e9:.0f} GFLOP",
            f"{seconds:.2f} s",
            f"{streams * output / seconds:.0f}",
        )
    return table


def _goodput() -> Table:
    title = f"Load (good: first token within {GOOD_FIRST_S * 1e3:.0f} ms, mean gap within {GOOD_GAP_S * 1e3:.0f} ms)"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    for column in ("requests/s", "tokens/s", "TTFT p50", "p99", "ITL p50", "p99", "good", "goodput, requests/s"):
        table.add_column(column, justify="right")
    for rate in RATES:
        firsts, gaps, good, seconds = _simulated(rate)
        table.add_row(
            str(rate),
            f"{REQUESTS * OUTPUT / seconds:.0f}",
            *(f"{_percentile(firsts, p) * 1e3:.0f} ms" for p in (0.5, 0.99)),
            *(f"{_percentile(gaps, p) * 1e3:.1f} ms" for p in (0.5, 0.99)),
            f"{good / REQUESTS:.0%}",
            f"{good / seconds:.1f}",
        )
    return table


def _step_seconds(tokens: int) -> float:
    weights = sum(num_weights(QWEN3_8B))
    return H100.seconds(2 * weights, 2 * weights * tokens)


def _simulated(rate: float) -> tuple[list[float], list[float], int, float]:
    """Requests at random times through the scheduler; returns times to first tokens, gaps, good requests, seconds."""
    rng, at = random.Random(1), 0.0
    arrivals: dict[str, float] = {}
    for index in range(REQUESTS):
        at += rng.expovariate(rate)
        arrivals[str(index)] = at
    simulation = Simulation(
        ResolvedConfig(
            page_size=16, num_pages=8000, context_length=1024, max_prefill_tokens=1024, max_running_requests=64
        )
    )
    times: dict[str, list[float]] = {name: [] for name in arrivals}
    clock, waiting = 0.0, list(arrivals)
    while waiting or simulation.scheduler.has_work:
        while waiting and arrivals[waiting[0]] <= clock:
            name = waiting.pop(0)
            prompt = [rng.randrange(1000) for _ in range(PROMPT)]
            simulation.add(Request(name, prompt, SamplingParams(max_tokens=OUTPUT)))
        if not simulation.scheduler.has_work:
            clock = arrivals[waiting[0]]
            continue
        before = _computed(simulation)
        outputs = simulation.step()
        clock += _step_seconds(max(_computed(simulation) - before, 1))
        for output in outputs:
            times[output.request_id].append(clock)
    firsts = [moments[0] - arrivals[name] for name, moments in times.items()]
    means = [(moments[-1] - moments[0]) / (OUTPUT - 1) for moments in times.values()]
    gaps = [b - a for moments in times.values() for a, b in itertools.pairwise(moments)]
    good = sum(wait <= GOOD_FIRST_S and mean <= GOOD_GAP_S for wait, mean in zip(firsts, means, strict=True))
    return firsts, gaps, good, clock


def _computed(simulation: Simulation) -> int:
    """Tokens that were computed so far."""
    return sum(
        len(request.prompt_ids) + len(request.output_ids) if request.finish_reason else request.num_computed_tokens
        for request in simulation.requests.values()
    )


def _percentile(values: Sequence[float], share: float) -> float:
    if share == 0.5:
        return statistics.median(values)
    return sorted(values)[int(share * (len(values) - 1))]


if __name__ == "__main__":
    main()
