"""`deterministic` in bfloat16: the same bits for a request alone and in any batch, chunked or not, cached or not."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from mini_sglang.sampling_params import SamplingParams
from tests.gpu.conftest import run_on_gpu
from tests.tiny import Checkpoints, make_ragged_prompts, run_all

pytestmark = pytest.mark.gpu

SETTINGS: dict[str, dict[str, Any]] = {
    "as served": {},
    "chunks of 13": {"max_prefill_tokens": 13},
    "chunks of 64, no reuse": {"max_prefill_tokens": 64, "cache": "naive"},
    "no graphs, no overlap": {"cuda_graph_max_bs": 0, "run_ahead": 0},
    "small pool": {"num_pages": 40, "page_size": 16},
}


FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 64, "num_attention_heads": 8, "num_key_value_heads": 2},
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "mistral": {"sliding_window": 24},
}


@pytest.mark.parametrize("family", list(FAMILIES))
def test_a_request_has_the_same_bits_alone_and_in_any_company(family: str, checkpoints: Checkpoints) -> None:
    path = checkpoints.write(family, **FAMILIES[family]).path
    prompts = make_ragged_prompts(16, 320)
    params = [
        SamplingParams(temperature=0.0 if index % 2 else 0.9, seed=index, max_tokens=24, ignore_eos=True, logprobs=20)
        for index in range(16)
    ]

    def bits(outputs: list[list[Any]]) -> list[Any]:
        return [[(output.token_ids, output.logprobs) for output in of_prompt] for of_prompt in outputs]

    with run_on_gpu(path, dtype="bfloat16", deterministic=True, cache="naive") as engine:
        alone = [bits(run_all(engine, [p], [how]))[0] for p, how in zip(prompts, params, strict=True)]
    for name, settings in SETTINGS.items():
        with run_on_gpu(path, dtype="bfloat16", deterministic=True, **settings) as engine:
            if "num_pages" in settings:
                engine.scheduler.expected_output = 0.0
            for turn, arrivals in enumerate((1000, 1, 3)):  # the prompts are cached from the second turn on
                order = list(range(16))
                random.Random(turn).shuffle(order)
                got = bits(run_all(engine, [prompts[i] for i in order], [params[i] for i in order], arrivals=arrivals))
                wrong = [index for place, index in enumerate(order) if got[place] != alone[index]]
                assert not wrong, f"{name}, turn {turn}: requests {wrong} differ from alone"
            # half of each answer as a part of the prompt: decoded and cached once, or computed as a prompt now
            answers = [[token for token_ids, _ in request for token in token_ids] for request in alone]
            longer = [prompt + answer[:12] for prompt, answer in zip(prompts, answers, strict=True)]
            shorter = [msgspec.structs.replace(how, max_tokens=12) for how in params]
            got = bits(run_all(engine, longer, shorter))
            wrong = [index for index in range(16) if got[index] != alone[index][12:]]
            assert not wrong, f"{name}: requests {wrong} go on otherwise after half of their answer"
