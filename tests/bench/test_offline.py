"""The offline workload is the published one, and a run returns every token asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from mini_sglang.bench.host_time import host_time
from mini_sglang.bench.latency import measure_latency
from mini_sglang.bench.offline import Workload, measure_offline, run
from mini_sglang.config import EngineConfig
from mini_sglang.engine import Engine
from tests.tiny import Checkpoints


@pytest.fixture
def engine(checkpoints: Checkpoints) -> Iterator[Engine]:
    model = str(checkpoints.write().path)
    engine = Engine(EngineConfig(model=model, dtype="float32", num_threads=1, num_pages=256, max_running_requests=20))
    yield engine
    engine.close()


def test_the_workload_is_the_published_one() -> None:
    workload = Workload.random(256)
    assert sum(len(prompt) for prompt in workload.prompts) == 142_827
    assert workload.num_output_tokens == 133_966


def test_a_shifted_workload_has_other_ids_and_the_same_lengths() -> None:
    workload = Workload.random(3, longest=20, shortest=10)
    shifted = workload.shifted(1, vocab_size=320)
    assert shifted.output_lengths == workload.output_lengths
    for before, after in zip(workload.prompts, shifted.prompts, strict=True):
        assert after == [(token + 1) % 320 for token in before]


def test_a_workload_of_impossible_lengths_is_refused() -> None:
    with pytest.raises(ValueError, match="shortest must be at most longest, got 30 and 20"):
        Workload.random(2, longest=20, shortest=30)


def test_a_run_returns_every_token(engine: Engine) -> None:
    result = run(engine, Workload([[3, 4, 5], [6] * 40], [7, 12]))
    assert result.steps >= 12
    assert result.tokens_per_second > 0
    assert result.drafts is None


def test_a_run_tells_what_became_of_its_drafts(checkpoints: Checkpoints) -> None:
    config = EngineConfig(model=str(checkpoints.write().path), dtype="float32", num_threads=1, num_pages=64)
    engine = Engine(config.replace(speculative="ngram", speculative_gate=False))
    workload = Workload([[3, 4, 5] * 4, [6] * 9], [30, 20], temperature=0.0)
    drafts = [run(engine, workload).drafts for _ in range(2)]
    stats = engine.stats().drafts
    assert stats is not None
    assert [each and each.num_draft_tokens > 0 for each in drafts] == [True, True]
    assert stats.num_drafts == sum(each.num_drafts for each in drafts if each)
    assert f"{drafts[1]}".startswith("drafts: ")
    engine.close()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"context_length": 65}, "context_length must be at least 66, the workload's longest sequence, got 65"),
        ({"num_pages": 4}, "the KV cache holds 64 tokens, the workload's longest sequence has 66: raise num_pages"),
    ],
)
def test_a_workload_that_would_end_early_is_refused_by_name(
    checkpoints: Checkpoints, settings: dict[str, Any], message: str
) -> None:
    engine = Engine(EngineConfig(model=str(checkpoints.write().path), dtype="float32", num_threads=1, **settings))
    for measure in (measure_offline, measure_latency):
        with pytest.raises(ValueError, match=message):
            measure(engine, Workload.streams(2, 30, 36))
    run(engine, Workload([[3] * 30], [35]))  # the token that is sampled last needs no place
    engine.close()


def test_a_run_calls_back_before_every_step(engine: Engine) -> None:
    steps: list[int] = []
    result = run(engine, Workload([[3, 4, 5]], [7]), before_step=steps.append)
    assert steps == list(range(result.steps))


def test_a_measurement_repeats_the_run_and_finds_nothing_cached(engine: Engine) -> None:
    workload = Workload.random(18, longest=12, shortest=6)
    cached = engine.stats().num_cached_tokens
    measured = measure_offline(engine, workload, runs=2)
    assert len(measured.runs) == 2
    assert measured.best.tokens_per_second == max(run.tokens_per_second for run in measured.runs)
    assert [time.running for time in measured.host] == [16, 18]
    assert measured.idle_share is None
    assert engine.stats().num_cached_tokens - cached < 18 * 3  # a beginning that two random prompts share by chance


def test_streams_that_start_together_are_timed_token_by_token(engine: Engine) -> None:
    [streams] = measure_latency(engine, Workload.streams(2, 5, 8), runs=1)
    assert streams.tokens_per_second == pytest.approx(16 / streams.seconds)
    assert 0 < streams.token_ms_median <= streams.token_ms_p99
    assert streams.first_token_ms < streams.seconds * 1e3


@pytest.mark.parametrize("measure", [measure_offline, measure_latency])
def test_a_bar_on_a_terminal_says_how_many_runs_are_done(
    engine: Engine, measure: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    workload = Workload.streams(2, 5, 3)
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    measure(engine, workload, runs=1)
    assert capsys.readouterr() == ("", "")
    monkeypatch.setenv("FORCE_COLOR", "1")
    measure(engine, workload, runs=1)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert all(done in shown.err for done in ("0/2", "1/2", "2/2"))


def test_host_time_leaves_the_engine_as_it_was(engine: Engine) -> None:
    time = host_time(engine, 4, steps=10)
    assert time.running == 4
    assert time.total_us < time.schedule_us + time.launch_us + time.update_us  # on a CPU a launch is the step itself
    assert not engine.has_work
    engine.check()
    assert "launch" not in vars(engine.executor)
    run(engine, Workload([[3, 4, 5]], [7]))


def test_host_time_is_measured_in_a_pool_that_is_too_small_for_all_answers(checkpoints: Checkpoints) -> None:
    """After long answers the scheduler admits few, and of so many requests some wait for pages."""
    engine = Engine(EngineConfig(model=str(checkpoints.write().path), dtype="float32", num_threads=1, num_pages=40))
    workload = Workload.random(18, longest=90, shortest=60)
    measured = measure_offline(engine, workload, runs=1)
    assert [time.running for time in measured.host] == [10]
    assert engine.scheduler.expected_output > 60
    engine.close()


def test_host_time_refuses_more_requests_than_the_engine_holds(engine: Engine) -> None:
    with pytest.raises(ValueError, match="running must be at most max_running_requests 20, got 21"):
        host_time(engine, 21)
