"""`mini-sglang bench serving`: open the data, load the server at each rate, report.

It talks HTTP only, so the server may be anybody's. Imports no torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import resource
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import msgspec
from rich.progress import TimeElapsedColumn

from mini_sglang.bench.acceptance import Acceptance
from mini_sglang.bench.apis import APIS, Sampling
from mini_sglang.bench.datasets import Requests, open_dataset
from mini_sglang.bench.draft_counters import read_drafts
from mini_sglang.bench.http_client import NOT_CONNECTED, Exchange, HttpClient
from mini_sglang.bench.load_generator import Load, LoadGenerator, LoadRequest, OnProgress
from mini_sglang.bench.output import load_pyplot, progress_bar, show
from mini_sglang.bench.queue_time import QueueTimes
from mini_sglang.bench.serving_config import ServingConfig
from mini_sglang.bench.serving_figures import Distribution, Figures, figures_of, medians
from mini_sglang.bench.serving_report import plot_rates, serving_report
from mini_sglang.bench.sweep import OTHER_DATA, highest_rate, send_times, sweep

_REFRESH_S = 1.0  # between two drawings of the progress bar, which take time from the generator


def bench_serving(config: ServingConfig, *, json_path: Path | None = None, plot_path: Path | None = None) -> bool:
    """Measure, print tables and write files; True if any request was answered.

    Raises ValueError or OSError for data or a server that it cannot work with, or if matplotlib is needed and missing.
    """
    if plot_path is not None:
        if config.sweep is None:
            raise ValueError("--plot draws curves over rates, so it needs --sweep")
        load_pyplot()
    runs = asyncio.run(measure(config, open_dataset(config)))
    results = [medians(of_rate) for of_rate in runs]
    highest = highest_rate(config, results)
    public = dataclasses.replace(config, api_key=None, header=())  # these may be secret
    figures = {"config": public, "highest_rate": highest, "results": results, "runs": runs}
    show(serving_report(config, results, highest), figures, json_path)
    if plot_path is not None:
        plot_rates(plot_path, results, highest)
    return any(result.num_completed for result in results)


async def measure(config: ServingConfig, requests: Requests) -> list[list[Figures]]:
    """The figures of each run at each rate, a search's by rising rate.

    Raises ConnectionError if the server does not answer at all.
    """
    _allow_many_connections()
    async with HttpClient(config.url, config.headers(), timeout_s=config.timeout) as client:
        model = await _model(config, client)
        sampling = Sampling(model, config.temperature, config.ignore_eos, config.extra_fields())
        return await sweep(config, partial(_measure_once, config, client, sampling, requests))


async def _measure_once(
    config: ServingConfig,
    client: HttpClient,
    sampling: Sampling,
    requests: Requests,
    rate: float | None,
    seed: int,
    times: int,
) -> Figures:
    """A run of its own; `seed` is that of its requests, `times` that of their arrivals."""
    if config.flush_cache:
        _check(await client.post("/flush_cache", b"{}"), "POST /flush_cache")
    if config.warmup:
        await _load(config, client, sampling, requests(seed + OTHER_DATA)[: config.warmup], concurrency=config.warmup)
    before = await _metrics(client)
    sent = requests(seed)[: config.num_requests_at(rate)]
    load = await _load(config, client, sampling, sent, concurrency=config.concurrency, rate=rate, seed=times)
    after = await _metrics(client)
    drafts = Acceptance.between(read_drafts(before), read_drafts(after))
    return figures_of(load, rate=rate, slos=config.slos(), queue_ms=_queue_ms(before, after), drafts=drafts)


async def _load(
    config: ServingConfig,
    client: HttpClient,
    sampling: Sampling,
    requests: list[LoadRequest],
    *,
    concurrency: int | None,
    rate: float | None = None,
    seed: int = 0,
) -> Load:
    """All of `requests`: in a closed loop, at a rate, at times drawn from `seed`, or at the times of their trace."""
    what = "requests" if rate is None else f"{rate:g} requests/s"
    with _progress(len(requests), what) as on_progress:
        generator = LoadGenerator(client, APIS[config.api], sampling, requests, on_progress)
        if concurrency is not None:
            return await generator.at_concurrency(concurrency)
        return await generator.at_times(send_times(config, requests, rate, seed), in_turn=rate is None)


async def _metrics(client: HttpClient) -> str:
    """The server's Prometheus metrics; nothing if it has none."""
    exchange = await client.get("/metrics")
    if exchange.error is not None or exchange.status != 200:
        return ""
    return exchange.body.decode()


def _queue_ms(before: str, after: str) -> Distribution | None:
    first, last = QueueTimes.read(before), QueueTimes.read(after)
    return None if first is None or last is None else last.since(first)


async def _model(config: ServingConfig, client: HttpClient) -> str | None:
    """The model that was named, or the server's first; None if it has no such route, and then needs no name either.

    The server is asked in any case, so that one that is not there is reported before a whole load has failed.
    """
    exchange = await client.get("/v1/models")
    if exchange.error is not None and exchange.error.startswith(NOT_CONNECTED):
        raise ConnectionError(
            f"no server answers at {config.url} ({exchange.error.removeprefix(NOT_CONNECTED)}); "
            "start one with mini-sglang serve, or say with --url where it is"
        )
    if config.model_name or exchange.status == 404:
        return config.model_name
    _check(exchange, "GET /v1/models")
    return str(msgspec.json.decode(exchange.body)["data"][0]["id"])


def _check(exchange: Exchange, what: str) -> None:
    """Raise ConnectionError unless the answer is a 200."""
    if exchange.error is not None or exchange.status != 200:
        answer = exchange.error or f"HTTP {exchange.status} {exchange.body[:200].decode(errors='replace')}"
        raise ConnectionError(f"the server did not take {what}: {answer}")


def _allow_many_connections() -> None:
    """As many open sockets as the system lets this process have; there is one for each request under way."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


@contextlib.contextmanager
def _progress(total: int, what: str) -> Iterator[OnProgress]:
    with progress_bar(TimeElapsedColumn()) as bar:
        task = bar.add_task(what, total=total)
        drawn = 0.0

        def on_progress(sent: int, ended: int) -> None:
            nonlocal drawn
            if not bar.disable and time.perf_counter() - drawn > _REFRESH_S:
                drawn = time.perf_counter()
                bar.update(task, completed=ended, description=f"{what}, {sent - ended} under way", refresh=True)

        yield on_progress
