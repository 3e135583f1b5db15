"""What has broken engines that run ahead of the device: equal prompts at once, and aborts in the very step of the end.

On a CPU and, where there is one, on a GPU, with and without run-ahead and graphs; every page is counted afterwards.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest

from mini_sglang.engine import Engine
from mini_sglang.outputs import FinishReason
from mini_sglang.request import Request
from mini_sglang.sampling_params import SamplingParams
from tests.tiny import Checkpoints, TinyCheckpoint, generate_ids, greedy_ids, run_engine

GPU = {"device": "cuda", "max_running_requests": 16}
MODES = {
    "cpu": {"device": "cpu", "run_ahead": 0},
    "cpu, run-ahead 1": {"device": "cpu", "run_ahead": 1},
    "gpu, no graphs": {**GPU, "run_ahead": 0, "cuda_graph_max_bs": 0},
    "gpu, no graphs, run-ahead 1": {**GPU, "run_ahead": 1, "cuda_graph_max_bs": 0},
    "gpu": {**GPU, "run_ahead": 0},
    "gpu, run-ahead 1": {**GPU, "run_ahead": 1},
}


class Collected:
    """What an engine has put out, by request; its books are checked after every step."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.tokens: defaultdict[str, list[int]] = defaultdict(list)
        self.reasons: dict[str, FinishReason] = {}

    def step(self) -> None:
        for output in self._engine.step():
            self.tokens[output.request_id] += output.token_ids
            if output.finish_reason is not None:
                self.reasons[output.request_id] = output.finish_reason
        self._engine.check()


@pytest.fixture(params=[pytest.param(name, marks=[pytest.mark.gpu] if "gpu" in name else []) for name in MODES])
def mode(request: pytest.FixtureRequest) -> dict[str, Any]:
    settings: dict[str, Any] = MODES[request.param]
    return settings


@pytest.fixture(scope="module")
def checkpoint(checkpoints: Checkpoints) -> TinyCheckpoint:
    return checkpoints.write("llama")


@pytest.mark.parametrize("cache", ["radix", "naive"])
def test_thirteen_equal_prompts_at_once(checkpoint: TinyCheckpoint, mode: dict[str, Any], cache: str) -> None:
    with run_engine(checkpoint.path, cache=cache, **mode) as engine:
        for length in (1, 15, 16, 17, 90):
            prompt = [3 + length + index % 7 for index in range(length)]
            expected = [greedy_ids(checkpoint.model, prompt, 12)] * 13
            assert generate_ids(engine, [prompt] * 13, num_tokens=12) == expected, f"{length} tokens"
            assert generate_ids(engine, [prompt] * 13, num_tokens=12, arrivals=5) == expected, f"{length} tokens, again"


def test_equal_answers_become_shared_while_another_request_waits(
    checkpoint: TinyCheckpoint, mode: dict[str, Any]
) -> None:
    """Who may have to wait has the answers published: twelve requests change over to the first one's pages."""
    prompt = list(range(5, 10))
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    masked = SamplingParams(regex="a")
    with run_engine(checkpoint.path, page_size=4, **mode) as engine:
        got = Collected(engine)
        for index in range(13):
            engine.add_request(str(index), prompt, params)
        while len(got.tokens["12"]) < 50:
            got.step()
        own = engine.stats().num_used_pages
        engine.scheduler.add(Request("masked", prompt, masked, frozenset({2})))  # what it may begin with is never said
        got.step()
        got.step()
        assert engine.stats().num_used_pages < own / 4
        while len(got.reasons) < 13:
            got.step()
        engine.abort("masked")
    assert list(got.tokens.values()) == [greedy_ids(checkpoint.model, prompt, 60)] * 13


@pytest.mark.parametrize("end", [FinishReason.LENGTH, FinishReason.STOP])
def test_aborts_at_every_step_around_the_end(
    checkpoint: TinyCheckpoint, mode: dict[str, Any], end: FinishReason
) -> None:
    """Two requests end by themselves in one step and are aborted there, a step earlier, a step later, and so on.

    Others with the same beginning, and one that takes the pages and the slot just left, get what they get alone.
    """
    prompt = list(range(5, 42))
    tokens = greedy_ids(checkpoint.model, prompt, 16)
    length = next(count for count in range(5, 16) if tokens[count - 1] not in tokens[: count - 1])
    stop = [tokens[length - 1]] if end is FinishReason.STOP else []
    limit = length if end is FinishReason.LENGTH else 16
    ending = SamplingParams(temperature=0, max_tokens=limit, ignore_eos=True, stop_token_ids=stop)
    lasting = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    reached = set()
    with run_engine(checkpoint.path, **{**mode, "max_running_requests": 4}) as engine:
        for steps in range(length + 4):
            got = Collected(engine)
            engine.add_request("ends", prompt, ending)
            engine.add_request("ends too", prompt, ending)
            engine.add_request("lasts", prompt, lasting)
            for _ in range(steps):
                got.step()
            reached.add(len(got.tokens["ends"]))
            expected = {name: (list(got.tokens[name]), got.reasons.get(name)) for name in ("ends", "ends too")}
            for name in expected:
                engine.abort(name)
            engine.add_request("successor", prompt, lasting)
            while engine.has_work:
                got.step()
            assert got.tokens["lasts"] == got.tokens["successor"] == tokens, f"abort after {steps} steps"
            for name, (before, reason) in expected.items():  # nothing comes after an abort
                assert (got.tokens[name], got.reasons.get(name)) == (before, reason), f"abort after {steps} steps"
                assert reason in (None, end)
                assert before == tokens[: len(before)]
    assert reached == set(range(length + 1)), "the aborts missed a step"


def test_everything_aborted_at_once_leaves_nothing_behind(checkpoint: TinyCheckpoint, mode: dict[str, Any]) -> None:
    prompts = [[3 + index, *range(10, 30)] for index in range(12)]
    expected = [greedy_ids(checkpoint.model, prompt, 4) for prompt in prompts]
    params = [SamplingParams(temperature=0, max_tokens=1 + index, ignore_eos=True) for index in range(12)]
    with run_engine(checkpoint.path, **mode) as engine:
        for steps in range(14):
            for index, prompt in enumerate(prompts):
                engine.add_request(f"{steps}-{index}", prompt, params[index])
            for _ in range(steps):
                engine.step()
            for index in range(12):
                engine.abort(f"{steps}-{index}")
            assert generate_ids(engine, prompts, num_tokens=4) == expected, f"after an abort after {steps} steps"
            engine.check()
