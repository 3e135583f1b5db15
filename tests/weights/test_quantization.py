"""A published quantised checkpoint is the model that transformers makes of its dequantised weights, in every format."""

from __future__ import annotations

import pytest
import torch

from mini_sglang.weights.load import open_tensors
from mini_sglang.weights.model_config import load_model_config
from tests.tiny import (
    Checkpoints,
    TinyCheckpoint,
    generate_ids,
    greedy_ids,
    make_ragged_prompts,
    run_engine,
    use_thread_workers,
)
from tests.weights.quantized import FORMATS, write


@pytest.fixture(autouse=True)
def thread_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    use_thread_workers(monkeypatch)


def assert_same_weights(checkpoint: TinyCheckpoint) -> None:
    state = checkpoint.model.state_dict()
    tensors = open_tensors(checkpoint.source, load_model_config(checkpoint.source), state)
    assert set(tensors) == set(state)
    for name, tensor in tensors.items():
        assert tensor.shape == state[name].shape
        assert torch.equal(tensor.dense().float(), state[name]), name


@pytest.mark.parametrize("name", FORMATS)
def test_greedy_tokens_are_those_of_the_dequantised_weights(name: str, checkpoints: Checkpoints) -> None:
    checkpoint = write(checkpoints, FORMATS[name])
    assert_same_weights(checkpoint)
    prompts = make_ragged_prompts(4, 320)
    expected = [greedy_ids(checkpoint.model, prompt, 8) for prompt in prompts]
    for tp in (1, 2, 3):
        with run_engine(checkpoint.path, tp=tp) as engine:
            assert generate_ids(engine, prompts, num_tokens=8) == expected, f"tp {tp}"
            assert generate_ids(engine, prompts[:1], num_tokens=8) == expected[:1], f"alone, tp {tp}"
