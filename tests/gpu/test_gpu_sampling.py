"""The same seed gives the same text: graphs on or off, overlap on or off, alone or in any company."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from mini_sglang.sampling_params import SamplingParams
from tests.gpu.conftest import run_on_gpu
from tests.tiny import TinyCheckpoint, run_all

pytestmark = pytest.mark.gpu

KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.5},
    {"temperature": 0},
    {"top_k": 5},
    {"top_p": 0.8},
    {"top_k": 40, "top_p": 0.9, "min_p": 0.02, "temperature": 1.3},
    {"min_p": 0.1},
    {"repetition_penalty": 1.5},
    {"presence_penalty": 1.0, "frequency_penalty": 0.5, "top_p": 0.95},
    {"repetition_penalty": 1.2, "temperature": 0},
    {"logit_bias": {5: 3.0, 6: -100.0}},
    {"allowed_token_ids": [10, 20, 30, 40]},
    {"logprobs": 3},
    {"logprobs": 0, "top_k": 7, "frequency_penalty": 1.0},
    {"prompt_logprobs": 2, "top_k": 30},
    {"regex": "[0-9]{30}"},
    {"regex": "[a-z ]{30}", "top_p": 0.9, "logprobs": 1},
    {"min_tokens": 10, "stop_token_ids": list(range(160)), "temperature": 2.0},
]


def requests() -> tuple[list[list[int]], list[SamplingParams]]:
    rng = random.Random(5)
    prompts = [[rng.randrange(3, 320) for _ in range(rng.randint(1, 40))] for _ in KINDS]
    params = [
        SamplingParams(**{"max_tokens": 16 + index, "seed": 100 + index, "ignore_eos": True, **kind})
        for index, kind in enumerate(KINDS)
    ]
    return prompts, params


def tokens(outputs: list[list[Any]]) -> list[list[int]]:
    return [[token for output in of_prompt for token in output.token_ids] for of_prompt in outputs]


@pytest.fixture(scope="module")
def alone(tiny_model: TinyCheckpoint) -> list[list[int]]:
    """What each request gets with the engine to itself, without graphs and overlap."""
    prompts, params = requests()
    with run_on_gpu(tiny_model.path, run_ahead=0, cuda_graph_max_bs=0) as engine:
        return [tokens(run_all(engine, [p], [how]))[0] for p, how in zip(prompts, params, strict=True)]


@pytest.mark.parametrize("arrivals", [1000, 2])
def test_the_same_seed_gives_the_same_text(
    tiny_model: TinyCheckpoint, alone: list[list[int]], mode: dict[str, Any], arrivals: int
) -> None:
    prompts, params = requests()
    with run_on_gpu(tiny_model.path, **mode) as engine:
        together = tokens(run_all(engine, prompts, params, arrivals=arrivals))
        for kind, got, want in zip(KINDS, together, alone, strict=True):
            assert got == want, f"{kind} in company differs from alone"
        order = list(range(len(KINDS)))
        random.Random(arrivals).shuffle(order)
        shuffled = tokens(run_all(engine, [prompts[i] for i in order], [params[i] for i in order], arrivals=3))
        assert shuffled == [alone[i] for i in order], "in another order"


def test_every_row_alone_with_graphs(tiny_model: TinyCheckpoint, alone: list[list[int]]) -> None:
    prompts, params = requests()
    with run_on_gpu(tiny_model.path) as engine:
        for index, kind in enumerate(KINDS):
            assert tokens(run_all(engine, [prompts[index]], [params[index]]))[0] == alone[index], kind


def test_a_plain_row_keeps_its_graph_text_when_filtered_rows_join_and_leave(tiny_model: TinyCheckpoint) -> None:
    """A batch changes between the graph's own draw and the sampler's while a long plain request runs through it."""
    plain = SamplingParams(temperature=1.0, seed=3, max_tokens=60, ignore_eos=True)
    filtered = [SamplingParams(top_k=9, seed=index, max_tokens=4, ignore_eos=True) for index in range(8)]
    prompt, others = [7, 8, 9], [[20 + index] * 5 for index in range(8)]
    with run_on_gpu(tiny_model.path) as engine:
        by_itself = tokens(run_all(engine, [prompt], [plain]))[0]
        assert tokens(run_all(engine, [prompt, *others], [plain, *filtered], arrivals=1))[0] == by_itself


def test_prompt_log_probabilities_are_transformers_beside_rows_of_a_graph(
    tiny_model: TinyCheckpoint, mode: dict[str, Any]
) -> None:
    prompts, params = requests()
    index = KINDS.index({"prompt_logprobs": 2, "top_k": 30})
    with torch.inference_mode():
        expected = tiny_model.model(torch.tensor([prompts[index]])).logits[0].log_softmax(-1)
    with run_on_gpu(tiny_model.path, **mode) as engine:
        for _ in range(2):  # the second time the prompt is in the prefix cache
            outputs = run_all(engine, prompts, params, arrivals=2)[index]
            entries = outputs[0].prompt_logprobs
            assert entries is not None
            assert [entry.token_ids[0] for entry in entries] == prompts[index][1:]
            own = [float(expected[position, token]) for position, token in enumerate(prompts[index][1:])]
            assert [entry.logprobs[0] for entry in entries] == pytest.approx(own, abs=1e-2)
