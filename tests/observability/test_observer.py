"""How long requests were queued, and traces of an engine's steps."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from mini_sglang.outputs import TokenOutput
from mini_sglang.sampling_params import SamplingParams
from tests.tiny import Checkpoints, run_engine

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def run(engine: Any) -> list[TokenOutput]:
    outputs: list[TokenOutput] = []
    while engine.has_work:
        outputs += engine.step()
    return outputs


def test_the_first_token_says_how_long_its_request_was_queued(checkpoints: Checkpoints) -> None:
    with run_engine(checkpoints.write().path, max_running_requests=1) as engine:
        start = time.perf_counter()
        for name in ("first", "second"):
            engine.add_request(name, [5, 6, 7], GREEDY)
        first_of: dict[str, TokenOutput] = {}
        taken = 0.0
        while engine.has_work:
            for output in engine.step():
                if output.finish_reason is not None and output.request_id == "first":
                    taken = time.perf_counter() - start
                if output.request_id in first_of:
                    assert output.queued_s is None
                first_of.setdefault(output.request_id, output)
        queued = {name: output.queued_s for name, output in first_of.items()}
        assert queued["first"] is not None
        assert queued["second"] is not None
        assert queued["first"] < taken / 2 < queued["second"]


def test_a_trace_names_each_step_and_its_phases(checkpoints: Checkpoints, tmp_path: Path) -> None:
    with run_engine(checkpoints.write().path, profile_dir=str(tmp_path / "traces")) as engine:
        engine.start_trace(num_steps=3)
        with pytest.raises(ValueError, match="already"):
            engine.start_trace()
        engine.add_request("a", [5, 6, 7], GREEDY)
        run(engine)
        path = Path(engine.stop_trace())
        with pytest.raises(ValueError, match="no trace"):
            engine.stop_trace()
    assert path.parent == tmp_path / "traces"
    names = [str(event["name"]) for event in json.loads(path.read_text())["traceEvents"]]
    for step, rows in ((1, "0 decodes, 3 tokens"), (2, "1 decodes, 1 tokens"), (3, "1 decodes, 1 tokens")):
        for phase in (f"schedule {step}", f"launch {step} ({rows})", f"wait {step}", f"update {step}"):
            assert names.count(phase) == 1
    assert "schedule 4" not in names
    assert any(name.startswith("aten::") for name in names)


def test_a_trace_may_begin_and_end_between_any_steps(checkpoints: Checkpoints, tmp_path: Path) -> None:
    with run_engine(checkpoints.write().path, profile_dir=str(tmp_path), run_ahead=1) as engine:
        engine.add_request("a", [5, 6, 7], GREEDY)
        engine.step()
        engine.start_trace()
        engine.step()
        path = Path(engine.stop_trace())
        assert len(run(engine)) > 0
    assert "launch 2 (1 decodes, 1 tokens)" in path.read_text()


def test_without_a_folder_there_is_no_trace(checkpoints: Checkpoints) -> None:
    with run_engine(checkpoints.write().path) as engine, pytest.raises(ValueError, match="profile_dir"):
        engine.start_trace()


def test_a_trace_that_cannot_be_written_is_an_error_of_who_asks_for_it(
    checkpoints: Checkpoints, tmp_path: Path
) -> None:
    folder = tmp_path / "traces"
    with run_engine(checkpoints.write().path, profile_dir=str(folder)) as engine:
        engine.start_trace(num_steps=2)
        folder.rmdir()
        engine.add_request("a", [5, 6, 7], GREEDY)
        assert sum(len(output.token_ids) for output in run(engine)) == 6
        with pytest.raises(OSError, match="cannot be written"):
            engine.stop_trace()
    (tmp_path / "file").touch()
    settings = {"profile_dir": str(tmp_path / "file")}
    with run_engine(checkpoints.write().path, **settings) as engine, pytest.raises(OSError, match="file"):
        engine.start_trace()
