"""How long the host works on a decode step: scheduling, launching and reading it, without the wait for the device."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from mini_sglang.engine import Engine
from mini_sglang.sampling_params import SamplingParams

_LONGEST_PROMPT = 32  # lengths vary, so that requests need new pages in different steps, as under real load
_SLACK = 50  # steps in which the prompts of some are still computed while others decode


@dataclass(frozen=True)
class HostTime:
    """Medians over decode steps with `running` requests, in microseconds."""

    running: int
    schedule_us: float
    launch_us: float  # on a CPU the step itself, which is not in `total_us`
    update_us: float
    total_us: float


def host_time(engine: Engine, running: int, *, steps: int = 100) -> HostTime:
    """Let `running` requests decode for `steps` steps together (fewer in a short context), then abort them.

    Raises ValueError if the engine cannot hold as many requests, or if they never all decode in one step.
    """
    most = engine.config.max_running_requests
    if most is not None and running > most:
        raise ValueError(f"running must be at most max_running_requests {most}, got {running}")
    ids = [f"host-time-{index}" for index in range(running)]
    rng = random.Random(running)
    model, scheduler = engine.model_config, engine.scheduler
    expected_output, scheduler.expected_output = scheduler.expected_output, 0.0  # all are to run, if pages suffice now
    for request_id in ids:
        length = rng.randint(1, min(_LONGEST_PROMPT, model.context_length // 2))
        prompt = [rng.randrange(model.vocab_size) for _ in range(length)]
        params = SamplingParams(max_tokens=min(steps + _SLACK, model.context_length - length), ignore_eos=True)
        engine.add_request(request_id, prompt, params)
    seen: list[tuple[float, float, float]] = []
    with ExitStack() as stack:
        methods = (scheduler, "schedule"), (engine.executor, "launch"), (scheduler, "update")
        spent = [stack.enter_context(_timed(owner, method)) for owner, method in methods]
        while engine.has_work and len(seen) < steps:
            for times in spent:
                times.clear()
            if len(engine.step()) == running and all(spent):  # every request got a token, and a step was launched
                seen.append((sum(spent[0]), sum(spent[1]), sum(spent[2])))
    for request_id in ids:
        engine.abort(request_id)
    while engine.has_work:
        engine.step()
    scheduler.expected_output = expected_output
    if not seen:
        raise ValueError(
            f"no step gave a token to each of {running} requests: raise num_pages or max_prefill_tokens, or lower "
            "max_running_requests"
        )
    return _medians(running, seen, launches_are_host_work=engine.config.device != "cpu")


def most_at_once(engine: Engine) -> int:
    """As many requests as `host_time` can have decode in one step: 1 at least, and what the KV cache has room for."""
    pages_each = -(-2 * _LONGEST_PROMPT // engine.config.page_size)
    return max(1, min(engine.config.max_running_requests or 1, engine.stats().num_pages // pages_each))


def _medians(running: int, seen: list[tuple[float, float, float]], *, launches_are_host_work: bool) -> HostTime:
    totals = [schedule + update + launch * launches_are_host_work for schedule, launch, update in seen]
    schedule, launch, update = (statistics.median(times) * 1e6 for times in zip(*seen, strict=True))
    return HostTime(running, schedule, launch, update, statistics.median(totals) * 1e6)


@contextmanager
def _timed(owner: object, method: str) -> Iterator[list[float]]:
    """Time calls of `owner.method` while the context lasts: the seconds of each are appended to the list."""
    call: Callable[..., Any] = getattr(owner, method)
    seconds: list[float] = []

    def timed(*arguments: Any) -> Any:
        start = time.perf_counter()
        try:
            return call(*arguments)
        finally:
            seconds.append(time.perf_counter() - start)

    setattr(owner, method, timed)
    try:
        yield seconds
    finally:
        delattr(owner, method)  # the class's method shows again
