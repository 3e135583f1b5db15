"""Log-probabilities of a prompt equal transformers', however the prompt is cut up, cached, or computed again."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mini_sglang.engine import Engine
from mini_sglang.outputs import TokenLogprobs, TokenOutput
from mini_sglang.sampling_params import SamplingParams
from tests.tiny import Checkpoints, TinyCheckpoint, run_engine

PROMPT = [7, 11, 23, 5, 99, 42, 17, 3, 250, 8, 64, 128, 31, 90, 12, 77, 200, 1, 55, 310]
ASKING = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, prompt_logprobs=2)
PLAIN = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)


@pytest.fixture(scope="module")
def checkpoint(checkpoints: Checkpoints) -> TinyCheckpoint:
    return checkpoints.write("llama")


@pytest.fixture(scope="module")
def expected(checkpoint: TinyCheckpoint) -> torch.Tensor:
    """Log-probabilities [len(PROMPT) - 1, vocab] of the tokens after the first."""
    with torch.inference_mode():
        logits: torch.Tensor = checkpoint.model(torch.tensor([PROMPT])).logits[0, :-1]
    return logits.log_softmax(-1)


def answers(engine: Engine, **requests: tuple[list[int], SamplingParams]) -> dict[str, list[TokenOutput]]:
    for name, (prompt, params) in requests.items():
        engine.add_request(name, prompt, params)
    outputs: dict[str, list[TokenOutput]] = {name: [] for name in requests}
    while engine.has_work:
        for output in engine.step():
            outputs[output.request_id].append(output)
    engine.check()
    return outputs


def check(outputs: list[TokenOutput], expected: torch.Tensor) -> None:
    assert [output.prompt_logprobs is not None for output in outputs] == [True] + [False] * (len(outputs) - 1)
    entries: list[TokenLogprobs] = outputs[0].prompt_logprobs or []
    assert [entry.token_ids[0] for entry in entries] == PROMPT[1:]
    for entry, row in zip(entries, expected, strict=True):
        assert entry.logprobs[0] == pytest.approx(float(row[entry.token_ids[0]]), abs=1e-4)
        best = row.topk(2)
        assert entry.token_ids[1:] == best.indices.tolist()
        assert entry.logprobs[1:] == pytest.approx(best.values.tolist(), abs=1e-4)


@pytest.mark.parametrize("settings", [{}, {"max_prefill_tokens": 3}, {"run_ahead": 1, "max_prefill_tokens": 7}])
def test_they_equal_transformers_cached_or_not(
    checkpoint: TinyCheckpoint, expected: torch.Tensor, settings: dict[str, Any]
) -> None:
    with run_engine(checkpoint.path, num_pages=64, page_size=4, **settings) as engine:
        lone = answers(engine, plain=(PROMPT, PLAIN))["plain"]
        outputs = answers(engine, a=(PROMPT, ASKING), b=(PROMPT, PLAIN), c=(PROMPT, ASKING), d=(PROMPT[:1], ASKING))
    check(outputs["a"], expected)
    check(outputs["c"], expected)
    for name in ("a", "b", "c"):
        assert [output.token_ids for output in outputs[name]] == [output.token_ids for output in lone]
    assert outputs["a"][0].num_cached_tokens == 0
    assert outputs["b"][0].num_cached_tokens > 0
    assert outputs["b"][0].prompt_logprobs is None
    assert outputs["d"][0].prompt_logprobs == []


def test_they_come_once_when_the_request_is_preempted(checkpoint: TinyCheckpoint, expected: torch.Tensor) -> None:
    long = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, prompt_logprobs=2)
    requests = {f"r{index}": (PROMPT, long) for index in range(4)}
    with run_engine(checkpoint.path, num_pages=18, page_size=4, max_prefill_tokens=6) as engine:
        engine.scheduler.expected_output = 0.0  # admit boldly
        outputs = answers(engine, **requests)
        assert engine.stats().num_preemptions > 0
    for name in requests:
        check(outputs[name], expected)


def test_pieces_smaller_than_a_prompt_give_the_same(
    checkpoint: TinyCheckpoint, expected: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mini_sglang.execution.prompt_logprobs._PIECE", 4)
    with run_engine(checkpoint.path, num_pages=64) as engine:
        check(answers(engine, a=(PROMPT, ASKING))["a"], expected)


def test_no_end_token_comes_before_the_minimum(checkpoint: TinyCheckpoint) -> None:
    with run_engine(checkpoint.path, num_pages=64) as engine:
        free = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        tokens = [output.token_ids[0] for output in answers(engine, a=(PROMPT, free))["a"]]
        stops = SamplingParams(temperature=0, max_tokens=12, stop_token_ids=tokens[:1])
        assert len(answers(engine, a=(PROMPT, stops))["a"]) == 1
        held = SamplingParams(temperature=0, max_tokens=12, min_tokens=5, stop_token_ids=tokens[:1])
        drawn = [output.token_ids[0] for output in answers(engine, a=(PROMPT, held), b=(PROMPT, free))["a"]]
        assert tokens[0] not in drawn[:5]
        assert len(drawn) >= 5
        only = SamplingParams(temperature=0, max_tokens=12, min_tokens=5, stop_token_ids=[9], allowed_token_ids=[9])
        assert [output.token_ids for output in answers(engine, a=(PROMPT, only))["a"]] == [[9]]
