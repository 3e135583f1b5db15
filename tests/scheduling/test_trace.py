"""A recorded trace runs through the real scheduler with a cost model in place of a device.

The trace format is Mooncake's (one JSON object a line: timestamp in ms, input_length, output_length, and one hash id
per 512 prompt tokens; equal ids mean equal blocks). The test writes such a trace; `MINI_SGLANG_TRACE=FILE` replays the
first 1,000 requests of a recorded one instead, and `pytest -s` shows the figures.
"""

from __future__ import annotations

import json
import os
import random
import time
from pathlib import Path

import pytest

from mini_sglang.config import ResolvedConfig
from mini_sglang.request import Request
from mini_sglang.sampling_params import SamplingParams
from mini_sglang.scheduling.batch import StepResult
from mini_sglang.scheduling.scheduler import Scheduler
from mini_sglang.scheduling.stats import SchedulerStats

BLOCK = 512
STEP_MS, TOKEN_MS = 5.0, 0.01  # cost model of one step: launch and weights, plus computed tokens


def write_trace(path: Path, count: int) -> None:
    """Chats that grow turn by turn under a few shared system prompts, interleaved."""
    chance = random.Random(0)
    next_id = 1_000
    chats: list[list[int]] = []
    lines = []
    for number in range(count):
        if not chats or chance.random() < 0.4:
            chats.append([chance.randrange(3)])
        chat = chance.choice(chats[-40:])
        added = chance.randint(1, 12)
        chat += range(next_id, next_id + added)
        next_id += added
        record = {
            "timestamp": number * 100,
            "input_length": len(chat) * BLOCK - chance.randrange(BLOCK // 2),
            "output_length": chance.randint(1, 500),
            "hash_ids": chat.copy(),
        }
        lines.append(json.dumps(record))
    path.write_text("\n".join(lines))


def read_trace(path: Path, count: int) -> list[tuple[float, Request]]:
    """(arrival in ms, request) of the first `count` requests."""
    requests = []
    with path.open() as lines:
        for number, line in zip(range(count), lines, strict=False):
            record = json.loads(line)
            tokens = [block * BLOCK + i for block in record["hash_ids"] for i in range(BLOCK)][: record["input_length"]]
            params = SamplingParams(max_tokens=record["output_length"], ignore_eos=True)
            requests.append((float(record["timestamp"]), Request(str(number), tokens, params)))
    return requests


def cached_without_limit(trace: list[tuple[float, Request]]) -> int:
    """Prompt tokens that a cache which forgets nothing finds in whole blocks, if each request comes after the last."""
    seen: set[int] = set()
    total = 0
    for _, request in trace:
        blocks = [token // BLOCK for token in request.prompt_ids[::BLOCK]]
        shared = next((index for index, block in enumerate(blocks) if block not in seen), len(blocks))
        total += min(shared * BLOCK, len(request.prompt_ids) - 1)
        seen.update(blocks)
    return total


def replay(trace: list[tuple[float, Request]], config: ResolvedConfig) -> tuple[SchedulerStats, float]:
    """Run the whole trace; returns the scheduler's figures and the simulated time in ms."""
    scheduler, now, arrived = Scheduler(config), 0.0, 0
    while arrived < len(trace) or scheduler.has_work:
        while arrived < len(trace) and (trace[arrived][0] <= now or not scheduler.has_work):
            now = max(now, trace[arrived][0])
            scheduler.add(trace[arrived][1])
            arrived += 1
        batch = scheduler.schedule()
        assert batch is not None
        now += STEP_MS + TOKEN_MS * batch.num_tokens
        sampled = sum(row.samples for row in batch.rows)
        scheduler.update(batch, StepResult([0] * sampled, [None] * sampled))
    scheduler.check()
    return scheduler.stats(), now


@pytest.mark.parametrize("schedule", ["fcfs", "lpm"])
def test_a_trace_of_a_thousand_requests_runs_through_the_scheduler_alone(tmp_path: Path, schedule: str) -> None:
    recorded = os.environ.get("MINI_SGLANG_TRACE")
    path = Path(recorded) if recorded else tmp_path / "trace.jsonl"
    if not recorded:
        write_trace(path, 1_000)
    trace = read_trace(path, 1_000)
    config = ResolvedConfig(
        num_pages=16_000_000 // 16,
        context_length=200_000,
        max_running_requests=256,
        max_prefill_tokens=8_192,
        schedule=schedule,  # type: ignore[arg-type]
    )
    started = time.perf_counter()
    stats, simulated_ms = replay(trace, config)
    seconds = time.perf_counter() - started
    hits, best = (
        stats.num_cached_tokens / stats.num_prompt_tokens,
        cached_without_limit(trace) / stats.num_prompt_tokens,
    )
    print(f"\n{schedule}: {stats.num_steps} steps of {simulated_ms / 1000:.0f} simulated seconds took {seconds:.1f} s")
    print(f"{hits:.2%} of {stats.num_prompt_tokens} prompt tokens cached, {best:.2%} without limit, {stats}")
    assert stats.num_finished == len(trace)
    assert stats.num_generated_tokens == sum(request.params.max_tokens or 0 for _, request in trace)
    assert stats.num_used_pages == 0
    assert hits > 0.97 * best
