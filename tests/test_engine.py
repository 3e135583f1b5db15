"""The engine keeps every request's work apart: bad input, failed steps and aborts end one and leave the others."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
import torch

from mini_sglang.config import EngineConfig
from mini_sglang.engine import Engine
from mini_sglang.execution.executor import StepHandle
from mini_sglang.outputs import FinishReason
from mini_sglang.sampling_params import SamplingParams
from mini_sglang.scheduling.batch import ScheduledBatch
from mini_sglang.weights.hub import ModelSource
from tests.tiny import Checkpoints

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture
def engine(checkpoints: Checkpoints) -> Any:
    engine = Engine(EngineConfig(model=str(checkpoints.write().path), dtype="float32", num_threads=1, num_pages=64))
    yield engine
    engine.close()


def run(engine: Engine) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {}
    while engine.has_work:
        for output in engine.step():
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
    engine.scheduler.check()
    return tokens


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], GREEDY, "prompt must hold at least one token"),
        ([5, 320], GREEDY, "between 0 and 319, got 320"),
        ([-1], GREEDY, "between 0 and 319, got -1"),
        ([1] * 300, GREEDY, "256"),
        ([1], SamplingParams(max_tokens=0), "max_tokens must be at least 1, got 0"),
        ([1], SamplingParams(temperature=float("nan")), "temperature must be a finite number"),
        ([1], SamplingParams(top_p=0.0), "top_p must be in"),
        ([1], SamplingParams(stop_token_ids=[320]), "stop_token_ids .* 320"),
        ([1], SamplingParams(logit_bias={320: 1.0}), "logit_bias .* 320"),
    ],
)
def test_bad_input_is_refused_by_name_and_harms_nobody(
    engine: Engine, prompt: list[int], params: SamplingParams, message: str
) -> None:
    engine.add_request("good", [7, 8, 9], GREEDY)
    with pytest.raises(ValueError, match=message):
        engine.add_request("bad", prompt, params)
    assert list(run(engine)) == ["good"]


def test_a_failed_step_ends_its_requests_with_the_error_and_spares_the_rest(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected: dict[str, list[int]] = {}
    for name, prompt in (("a", [3, 4, 5]), ("b", [6, 7, 8])):
        engine.add_request(name, prompt, GREEDY)
        expected |= run(engine)
    launch = engine.executor.launch

    def fail(batch: ScheduledBatch) -> StepHandle:
        monkeypatch.setattr(engine.executor, "launch", launch)
        raise MemoryError("no memory for this step")

    engine.add_request("a", [3, 4, 5], GREEDY)
    monkeypatch.setattr(engine.executor, "launch", fail)
    (output,) = engine.step()
    assert output.finish_reason is FinishReason.ERROR
    assert output.error == "MemoryError: no memory for this step"
    engine.add_request("b", [6, 7, 8], GREEDY)
    engine.add_request("a", [3, 4, 5], GREEDY)
    assert run(engine) == expected


@pytest.mark.parametrize(
    "error",
    [
        torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling cublasGemmEx"),
        RuntimeError("Triton Error [CUDA]: device-side assert triggered"),
    ],
)
@pytest.mark.parametrize("fails", ["launch", "result"])
def test_a_lost_device_is_an_error_of_the_engine(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, error: Exception, fails: str
) -> None:
    def fail(*_: object) -> None:
        raise error

    engine.add_request("a", [3, 4, 5], GREEDY)
    monkeypatch.setattr(*{"launch": (engine.executor, "launch"), "result": (StepHandle, "result")}[fails], fail)
    with pytest.raises(type(error)) as raised:
        engine.step()
    assert raised.value is error


def test_running_out_of_device_memory_ends_a_step_alone(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(batch: ScheduledBatch) -> StepHandle:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    engine.add_request("a", [3, 4, 5], GREEDY)
    with monkeypatch.context() as patch:
        patch.setattr(engine.executor, "launch", fail)
        (output,) = engine.step()
    assert output.finish_reason is FinishReason.ERROR
    engine.add_request("b", [3, 4, 5], GREEDY)
    assert len(run(engine)["b"]) == 8


def test_an_abort_frees_everything_at_any_moment(engine: Engine) -> None:
    for steps in range(6):
        engine.add_request("x", list(range(3, 40)), GREEDY)
        for _ in range(steps):
            engine.step()
        engine.abort("x")
        engine.abort("never existed")
        assert run(engine) == {}
        assert engine.stats().num_used_pages == 0
    assert engine.stats().num_aborted == 6


def test_seeded_requests_repeat_in_any_company_and_others_do_not(engine: Engine) -> None:
    def draw(company: int, seed: int | None) -> list[int]:
        params = SamplingParams(max_tokens=12, ignore_eos=True, seed=seed)
        engine.add_request("x", [9, 9, 9], params)
        for index in range(company):
            engine.add_request(str(index), [index + 3] * 5, SamplingParams(max_tokens=12, top_p=0.9))
        return run(engine)["x"]

    assert draw(0, 7) == draw(0, 7) == draw(6, 7)
    assert draw(0, 8) != draw(0, 7)
    assert len({tuple(draw(0, None)) for _ in range(4)}) > 1


def test_logprobs_come_with_every_token(engine: Engine) -> None:
    engine.add_request("x", [5, 6], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=3))
    seen = 0
    while engine.has_work:
        for output in engine.step():
            assert output.logprobs is not None
            (entry,) = output.logprobs
            assert entry.token_ids[0] == output.token_ids[0] == entry.token_ids[1]
            assert entry.logprobs[0] == entry.logprobs[1] >= entry.logprobs[2] >= entry.logprobs[3]
            seen += 1
    assert seen == 4


def test_random_weights_depend_on_the_seed_alone(checkpoints: Checkpoints) -> None:
    path = str(checkpoints.write().path)

    def tokens(seed: int) -> list[int]:
        config = EngineConfig(model=path, load_format="dummy", dtype="float32", num_threads=1, num_pages=64, seed=seed)
        engine = Engine(config)
        engine.add_request("x", [5, 6, 7], GREEDY)
        result = run(engine)["x"]
        engine.close()
        return result

    assert tokens(1) == tokens(1)
    assert tokens(1) != tokens(2)


def test_beside_a_stream_a_prompt_takes_several_steps_if_their_time_is_bounded(builtin_model: ModelSource) -> None:
    """A millisecond, or half as long as the stream alone takes: a prompt of 400 tokens takes many times that."""
    steps = {}
    for max_step_ms in (0, 1):
        config = EngineConfig(
            model=str(builtin_model.path), dtype="float32", num_threads=1, num_pages=64, max_step_ms=max_step_ms
        )
        engine = Engine(config)
        engine.add_request("stream", [1, 2, 3], SamplingParams(temperature=0, max_tokens=300, ignore_eos=True))
        engine.step()
        engine.add_request("prompt", list(range(400)), SamplingParams(temperature=0, max_tokens=1))
        received = [list(engine.step())]
        while "prompt" not in [output.request_id for output in received[-1]]:
            received.append(list(engine.step()))
        assert all("stream" in [output.request_id for output in outputs] for outputs in received)
        steps[max_step_ms] = len(received)
        engine.close()
    assert steps[0] == 1
    assert steps[1] > 5


def test_every_dtype_runs_on_any_cpu(checkpoints: Checkpoints) -> None:
    """Also one that the processor has no instructions for, which oneDNN refuses."""
    best: dict[str, float] = {}
    for dtype in ("float32", "bfloat16", "float16"):
        engine = Engine(EngineConfig(model=str(checkpoints.write().path), device="cpu", dtype=dtype, num_threads=1))
        engine.add_request("x", [5, 6, 7], SamplingParams(max_tokens=1, logprobs=1))
        [output] = engine.step().others
        assert output.logprobs is not None
        best[dtype] = output.logprobs[0].logprobs[1]
        engine.close()
    assert best["bfloat16"] == pytest.approx(best["float32"], abs=0.1)
    assert best["float16"] == pytest.approx(best["float32"], abs=0.02)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"device": "cuda:1"}, "device must be one of auto, cpu, cuda, got 'cuda:1'; CUDA_VISIBLE_DEVICES"),
        pytest.param(
            {"device": "cuda"},
            "device=cuda needs an NVIDIA GPU, and PyTorch found none; leave it at auto",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
        ({"context_length": 1000}, "context_length must be at most the model's 256, got 1000"),
        ({"device": "cpu", "cuda_graph_max_bs": 4}, "cuda_graph_max_bs must be 0 on a CPU, got 4"),
        ({"device": "cpu", "all_reduce": "nccl"}, "all_reduce must be auto on a CPU, where gloo sums, got nccl"),
        ({"weights": "packed"}, "weights=packed needs a quantised checkpoint"),
        ({"run_ahead": 33}, "run_ahead must be at most 32, got 33"),
        ({"max_step_ms": -1}, "max_step_ms must be an integer of at least 0, got -1"),
        ({"max_step_ms": True}, "max_step_ms must be an integer of at least 0, got True"),
        ({"max_step_ms": 0.5}, "max_step_ms must be an integer of at least 0, got 0.5"),
        ({"max_step_ms": 10**400}, "max_step_ms must be at most 3600000, got 10+; 0 bounds no step"),
        ({"num_threads": 1_000_000}, "num_threads must be at most 1024, got 1000000; one for each core"),
        ({"kv_cache_bytes": 100}, "kv_cache_bytes must hold at least two pages"),
        ({"device": "cpu", "num_pages": 10**12}, r"num_pages must be at most \d+, which fill this machine's memory"),
        (
            {"device": "cpu", "max_running_requests": 10**20},
            r"max_running_requests must be at most \d+, whose tables of context_length 256 fill this machine's memory, "
            r"got 10{20}; lower it or context_length",
        ),
    ],
)
def test_settings_that_do_not_fit_the_model_are_refused_by_name(
    checkpoints: Checkpoints, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Engine(EngineConfig(model=str(checkpoints.write().path), **settings))


@pytest.mark.parametrize("setting", ["num_pages", "max_running_requests"])
def test_memory_that_the_machine_does_not_give_names_the_settings_that_need_it(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch, setting: str
) -> None:
    monkeypatch.setattr(os, "sysconf", lambda name: 1 << 40)  # it claims so many pages of so many bytes
    settings: dict[str, Any] = {setting: 1 << 46}
    message = f"out of memory: .* do not fit: lower kv_cache_bytes, .*{setting}, .*can't allocate memory"
    with pytest.raises(ValueError, match=message):
        Engine(EngineConfig(model=str(checkpoints.write().path), device="cpu", **settings))


def test_random_weights_beyond_memory_ask_for_a_smaller_model(checkpoints: Checkpoints) -> None:
    folder = checkpoints.write().path
    shape = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**shape, "vocab_size": 2**31 - 1}))
    with pytest.raises(ValueError, match="out of memory: the weights do not fit: use a smaller model or dtype"):
        Engine(EngineConfig(model=str(folder), device="cpu", load_format="dummy"))
