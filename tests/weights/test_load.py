"""Checkpoints written by transformers and by the gguf package reach their slots value by value."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from mini_sglang.weights.load import dummy_weights, load_weights
from mini_sglang.weights.model_config import load_model_config
from mini_sglang.weights.tensor import CheckpointTensor, WeightsError, WeightSlot


class Store:
    """Slots that keep what they are given, dense."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        self.values: dict[str, torch.Tensor] = {}
        self.slots = {name: WeightSlot(shape, self._keeper(name)) for name, shape in shapes.items()}

    def _keeper(self, name: str) -> Callable[[CheckpointTensor], None]:
        def keep(tensor: CheckpointTensor) -> None:
            self.values[name] = tensor.dense().float().clone()

        return keep


def shapes_of(model: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_safetensors_load_value_by_value(write_checkpoint, family: str, sharded: bool, tied: bool) -> None:
    checkpoint = write_checkpoint(family, sharded=sharded, tie_word_embeddings=tied)
    assert (len(list(checkpoint.path.glob("*.safetensors"))) > 1) == sharded
    store = Store(shapes_of(checkpoint.model))
    load_weights(checkpoint.source, load_model_config(checkpoint.source), store.slots, show_progress=False)
    for name, parameter in checkpoint.model.named_parameters():
        assert torch.equal(store.values[name], parameter), name
