"""What the generator reports is what the server did; it keeps to its times, its concurrency and the turns."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from mini_sglang.bench.apis import APIS, Sampling
from mini_sglang.bench.http_client import HttpClient
from mini_sglang.bench.load_generator import Load, LoadGenerator, LoadRequest, arrival_times
from mini_sglang.bench.serving_figures import Distribution, Figures, figures_of

Start = Callable[..., str]
TOLERANCE = 0.02


def requests(count: int, output_length: int = 3) -> list[LoadRequest]:
    return [LoadRequest(lambda: [1, 2, 3, 4], output_length) for _ in range(count)]


def run(
    url: str, load: list[LoadRequest], how: Callable[[LoadGenerator], Awaitable[Load]]
) -> tuple[Load, list[list[float]]]:
    """The load, and by request when the server had read it and wrote each token, in the order of arrival."""

    async def both() -> tuple[Load, list[list[float]]]:
        async with HttpClient(url) as client:
            generator = LoadGenerator(client, APIS["completions"], Sampling(), load, lambda sent, ended: None)
            result = await how(generator)
            return result, msgspec.json.decode((await client.get("/record")).body)

    return asyncio.run(both())


def at_rate(rate: float, count: int) -> Callable[[LoadGenerator], Awaitable[Load]]:
    times = arrival_times(count, rate, "poisson", np.random.default_rng(0)).tolist()
    return lambda generator: generator.at_times(times)


def worst_error(figures: Figures, record: list[list[float]]) -> float:
    """The largest relative error of a percentile of TTFT, ITL, TPOT or E2E."""
    recorded = {
        "ttft_ms": [times[1] - times[0] for times in record],
        "itl_ms": [gap for times in record for gap in np.diff(times[1:])],
        "tpot_ms": [(times[-1] - times[1]) / (len(times) - 2) for times in record],
        "e2e_ms": [times[-1] - times[0] for times in record],
    }
    errors: list[float] = []
    for name, seconds in recorded.items():
        true, found = Distribution.of(np.asarray(seconds) * 1e3), getattr(figures, name)
        errors += [abs(getattr(found, part) / getattr(true, part) - 1) for part in ("mean", "p50", "p90", "p95", "p99")]
    return max(errors)


@pytest.mark.parametrize(("rate", "count"), [(10, 12), (1000, 150)])
def test_percentiles_are_those_that_the_server_recorded_or_sends_were_late(
    scripted_server: Start, rate: float, count: int
) -> None:
    """A machine too busy to be exact shows in the generator's own figures, and is no failure of the generator.

    Latencies are long here, so that 2 % of them is more than a process usually waits for its turn.
    """
    errors = []
    for attempt in range(3):
        url = scripted_server(ttft_ms=900, itl_ms=400, seed=attempt)
        load, record = run(url, requests(count), at_rate(rate, count))
        figures = figures_of(load, rate=rate, slos={})
        assert (figures.num_completed, figures.errors) == (count, {})
        error = worst_error(figures, record)
        if error < TOLERANCE:
            return
        assert figures.late_ms is not None
        assert figures.ttft_ms is not None
        if figures.late_ms.p99 < TOLERANCE * figures.ttft_ms.p50:
            errors.append(error)
    assert not errors, "the generator was in time and yet wrong"


def test_a_closed_loop_keeps_so_many_under_way(scripted_server: Start) -> None:
    load, record = run(
        scripted_server(ttft_ms=20, itl_ms=5), requests(20), lambda generator: generator.at_concurrency(4)
    )
    assert [outcome.error for outcome in load.outcomes] == [None] * 20
    under_way = [sum(other[0] <= times[0] < other[-1] for other in record) for times in record]
    assert max(under_way) == 4


def test_an_open_loop_does_not_wait(scripted_server: Start) -> None:
    """Twenty requests at once, all there before the first token."""
    load, record = run(scripted_server(ttft_ms=1500), requests(20), lambda generator: generator.at_times([0.0] * 20))
    assert max(times[0] for times in record) < min(times[1] for times in record)
    assert load.cpu_seconds > 0


def test_a_turn_is_held_back_until_the_one_before_is_answered(scripted_server: Start) -> None:
    def load(**later: Any) -> list[LoadRequest]:
        return [LoadRequest(lambda: [1], 2, after=after) for after in (None, 0, None)]

    url = scripted_server(ttft_ms=100)
    held, _ = run(url, load(), lambda generator: generator.at_times([0.0] * 3, in_turn=True))
    first, second, third = held.outcomes
    assert second.started >= first.started + first.e2e
    assert second.due > 0.05
    assert third.started < first.e2e
    free, _ = run(url, load(), lambda generator: generator.at_times([0.0] * 3))
    assert free.outcomes[1].started < free.outcomes[0].e2e


def test_what_fails_is_counted_by_kind_and_nowhere_else(scripted_server: Start) -> None:
    texts = ["fail", "fail", "cut", "error", "well"]
    load = [LoadRequest(lambda text=text: text, 4) for text in texts]  # type: ignore[misc]
    result, _ = run(scripted_server(ttft_ms=20, itl_ms=5), load, lambda generator: generator.at_times([0.0] * 5))
    figures = figures_of(result, rate=None, slos={"ttft": 1e6})
    assert figures.errors == {"HTTP 500": 2, "disconnected": 1, "error in the stream": 1}
    assert "told to fail" in figures.details["HTTP 500"]
    assert (figures.num_completed, figures.num_requests) == (1, 5)
    assert figures.output_tokens is not None
    assert figures.output_tokens.mean == 4
    assert figures.goodput == pytest.approx(figures.requests_per_second)
    assert figures.cached_share == 0.5


def test_the_garbage_collector_rests_during_a_run_and_only_then(scripted_server: Start) -> None:
    seen: list[bool] = []

    def prompt() -> list[int]:
        seen.append(gc.isenabled())
        return [1]

    run(scripted_server(ttft_ms=5), [LoadRequest(prompt, 1)] * 3, lambda generator: generator.at_concurrency(1))
    assert (seen, gc.isenabled()) == ([False] * 3, True)


def test_failures_do_not_pile_up_in_memory() -> None:
    count, num_objects = 1400, []

    def on_progress(sent: int, ended: int) -> None:
        if ended in (1, count):
            num_objects.append(len(gc.get_objects()))

    async def fail() -> None:
        async with HttpClient("http://127.0.0.1:9") as client:
            generator = LoadGenerator(client, APIS["completions"], Sampling(), requests(count), on_progress)
            await generator.at_concurrency(50)

    asyncio.run(fail())
    first, last = num_objects
    assert last - first < 60 * count  # each leaves 80 and more, until they are collected


def test_a_prompt_that_cannot_be_made_ends_the_run(scripted_server: Start) -> None:
    def fail() -> list[int]:
        raise ValueError("no such prompt")

    load = [*requests(1), LoadRequest(fail, 1)]
    with pytest.raises(ValueError, match="no such prompt"):
        run(scripted_server(ttft_ms=20), load, lambda generator: generator.at_concurrency(1))


def test_no_requests_are_no_run(scripted_server: Start) -> None:
    load, _ = run(scripted_server(), [], lambda generator: generator.at_times([]))
    assert figures_of(load, rate=1, slos={}).ttft_ms is None
