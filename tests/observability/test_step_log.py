"""The step log says what an engine did: every step, token, page and request, and nothing twice."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import pytest

from mini_sglang.bench.step_history import History
from mini_sglang.engine import Engine
from mini_sglang.execution.executor import StepHandle
from mini_sglang.observability.step_log import Arrived, Ended, Header, Step, StepLog, read_lines
from mini_sglang.outputs import FinishReason
from mini_sglang.sampling_params import SamplingParams
from mini_sglang.scheduling.batch import ScheduledBatch
from tests.tiny import Checkpoints, make_ragged_prompts, run_engine


def answer(length: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)


def steps_of(path: Path) -> list[Step]:
    return [line for line in read_lines(path) if isinstance(line, Step)]


def finish(engine: Engine) -> dict[str, int]:
    """Step until nothing is left; returns how many tokens each request got."""
    tokens: dict[str, int] = {}
    while engine.has_work:
        for output in engine.step():
            tokens[output.request_id] = tokens.get(output.request_id, 0) + len(output.token_ids)
    return tokens


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "steps.jsonl"


@pytest.mark.parametrize("run_ahead", [0, 1])
def test_a_log_adds_up_to_what_callers_got(checkpoints: Checkpoints, path: Path, run_ahead: int) -> None:
    settings = {
        "page_size": 4,
        "num_pages": 40,
        "max_prefill_tokens": 24,
        "run_ahead": run_ahead,
        "step_log": str(path),
    }
    with run_engine(checkpoints.write().path, **settings) as engine:
        engine.scheduler.expected_output = 0.0  # admits boldly, and so has to preempt
        prompts = make_ragged_prompts(12, engine.model_config.vocab_size)
        for index, prompt in enumerate(prompts):
            engine.add_request(str(index), prompt, answer(25 + index))
        tokens = finish(engine)
        stats = engine.stats()
    history = History(path)
    assert stats.num_preemptions > 0
    assert {life.request_id: life.tokens for life in history.lives} == tokens
    assert [life.prompt_tokens for life in history.lives] == list(map(len, prompts))
    assert {life.reason for life in history.lives} == {"length"}
    assert sum(life.cached_tokens for life in history.lives) == stats.num_cached_tokens
    assert sum(len(life.preempted_us) for life in history.lives) == stats.num_preemptions
    assert len(history.steps) == stats.num_steps
    for timed in history.steps:
        step = timed.step
        assert step.tokens == step.decodes + sum(chunk.count for chunk in step.chunks)
        assert step.free_pages + step.cached_pages + step.used_pages == 40
        assert set(step.host_us) == {"schedule", "launch", "wait", "update"}
        assert sum(step.host_us.values()) <= step.read_us - step.at_us
        assert step.device_us is None


def test_a_line_names_decoding_requests_only_where_others_decode_than_before(
    checkpoints: Checkpoints, path: Path
) -> None:
    with run_engine(checkpoints.write().path, step_log=str(path), run_ahead=1) as engine:
        for index in range(16):
            engine.add_request(f"request-{index}", [5 + index], answer(100))
        finish(engine)
    steps = steps_of(path)
    assert len(steps) >= 100
    named = [step for step in steps if step.decode_ids is not None]
    assert [len(step.decode_ids or ()) for step in named] == [16]
    assert all(len(msgspec.json.encode(step)) < 300 for step in steps[2:])


def test_lines_reach_the_file_in_large_pieces_and_at_rest(checkpoints: Checkpoints, path: Path) -> None:
    with run_engine(checkpoints.write().path, step_log=str(path)) as engine:
        engine.add_request("a", [5], answer(50))
        header_bytes = path.stat().st_size
        sizes = set()
        start = time.perf_counter()
        while engine.has_work:
            engine.step()
            sizes.add(path.stat().st_size)
        flushes_of_old_lines = int(time.perf_counter() - start)
        assert header_bytes > 0
        assert len(sizes - {header_bytes}) <= 1 + flushes_of_old_lines
        assert isinstance(list(read_lines(path))[-1], Ended)


def test_aborted_and_failed_requests_are_ended_in_the_log(
    checkpoints: Checkpoints, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with run_engine(checkpoints.write().path, step_log=str(path), run_ahead=1) as engine:
        engine.add_request("left", [5, 6], answer(50))
        engine.step()
        engine.abort("left")
        engine.abort("left")
        finish(engine)
        launch = engine.executor.launch

        def fail(batch: ScheduledBatch) -> StepHandle:
            monkeypatch.setattr(engine.executor, "launch", launch)
            raise MemoryError("no memory")

        engine.add_request("lost", [7, 8], answer(50))
        monkeypatch.setattr(engine.executor, "launch", fail)
        finish(engine)
        engine.add_request("left", [5, 6], answer(3))  # its id is free again
        assert finish(engine) == {"left": 3}
    lines = list(read_lines(path))
    ended = [(line.request_id, line.reason) for line in lines if isinstance(line, Ended)]
    assert ended == [("left", FinishReason.ABORT), ("lost", FinishReason.ERROR), ("left", FinishReason.LENGTH)]
    [error] = [line.error for line in lines if isinstance(line, Step) and line.error is not None]
    assert error == "MemoryError: no memory"
    assert [life.tokens for life in History(path).lives][1:] == [0, 3]


def test_the_header_has_the_resolved_configuration(checkpoints: Checkpoints, path: Path) -> None:
    with run_engine(checkpoints.write().path, step_log=str(path), num_pages=20) as engine:
        [header] = read_lines(path)
        assert isinstance(header, Header)
        assert (header.config["num_pages"], header.config["device"]) == (20, engine.config.device)


def test_a_full_disk_ends_the_log_and_not_the_engine(
    checkpoints: Checkpoints, caplog: pytest.LogCaptureFixture
) -> None:
    with run_engine(checkpoints.write().path, step_log="/dev/full") as engine:
        engine.add_request("a", [5], answer(5))
        assert finish(engine) == {"a": 5}
    assert [record.getMessage() for record in caplog.records if "step log" in record.getMessage()] == [
        "the step log /dev/full ends here: [Errno 28] No space left on device"
    ]


def test_a_path_that_cannot_be_is_an_error_before_a_model_is_loaded(tmp_path: Path) -> None:
    with (
        pytest.raises(OSError, match="no-folder"),
        run_engine("no-model", step_log=str(tmp_path / "no-folder" / "log")),
    ):
        pass


def test_a_torn_last_line_is_dropped_and_any_other_is_an_error(path: Path) -> None:
    log = StepLog(str(path))
    log.write(Header(began=0.0, config={}))
    log.write(Arrived(at_us=1, request_id="a", prompt_tokens=2))
    log.close()
    log.write(Arrived(at_us=2, request_id="late", prompt_tokens=2))
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"kind":"step","st')
    assert [type(line) for line in read_lines(path)] == [Header, Arrived]
    path.write_bytes(whole + b'{"kind":"unknown"}\n')
    with pytest.raises(ValueError, match="line 3"):
        list(read_lines(path))
    for text, message in (
        (b"hello\n", "line 1"),
        (whole.partition(b"\n")[2], "line 1 is not a header"),
        (whole * 2, "line 3 is a"),
    ):
        path.write_bytes(text)
        with pytest.raises(ValueError, match=message):
            list(read_lines(path))
    path.write_bytes(whole.replace(b'"version":1', b'"version":2'))
    with pytest.raises(ValueError, match="version 2"):
        list(read_lines(path))
