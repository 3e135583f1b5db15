"""On a GPU the step log has each step's device time, without anything waiting for it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mini_sglang.observability.step_log import Step, read_lines
from mini_sglang.sampling_params import SamplingParams
from tests.gpu.conftest import run_on_gpu
from tests.tiny import TinyCheckpoint, generate_ids

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("run_ahead", [0, 1])
def test_steps_have_a_device_time_that_fits_into_their_own(
    tiny_model: TinyCheckpoint, tmp_path: Path, run_ahead: int
) -> None:
    path = tmp_path / "steps.jsonl"
    with run_on_gpu(tiny_model.path, dtype="bfloat16", run_ahead=run_ahead, step_log=str(path)) as engine:
        for index in range(4):
            params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
            engine.add_request(str(index), list(range(5, 40 + index)), params)
        while engine.has_work:
            engine.step()
    steps = [line for line in read_lines(path) if isinstance(line, Step)]
    assert len(steps) >= 30
    for step in steps:
        assert step.device_us is not None
        assert 0 < step.device_us <= step.read_us - step.at_us


def test_a_trace_has_kernels(tiny_model: TinyCheckpoint, tmp_path: Path) -> None:
    with run_on_gpu(tiny_model.path, dtype="bfloat16", profile_dir=str(tmp_path)) as engine:
        engine.start_trace()
        engine.add_request("a", [5, 6, 7], SamplingParams(temperature=0, max_tokens=5))
        while engine.has_work:
            engine.step()
        trace = Path(engine.stop_trace()).read_text()
    assert '"cat": "kernel"' in trace
    assert "launch 1 (0 decodes, 3 tokens)" in trace


def test_without_a_log_no_event_measures_time(tiny_model: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    with run_on_gpu(tiny_model.path, dtype="bfloat16") as engine:
        monkeypatch.setattr(torch.cuda.Event, "elapsed_time", None)
        assert len(generate_ids(engine, [[5, 6, 7]], num_tokens=5)[0]) == 5
