"""`deterministic` is promised where it is kept, and refused elsewhere before any weight is loaded."""

from __future__ import annotations

import pytest

from mini_sglang.config import EngineConfig
from mini_sglang.execution.resolve import resolve
from mini_sglang.weights.model_config import load_model_config
from tests.tiny import Checkpoints


@pytest.mark.parametrize(
    ("device", "backend", "got"),
    [
        ("cpu", "auto", "cpu and cpu"),
        ("cpu", "reference", "cpu and reference"),
        ("cuda", "reference", "cuda and reference"),
    ],
)
def test_it_needs_a_gpu_and_the_triton_backend(checkpoints: Checkpoints, device: str, backend: str, got: str) -> None:
    source = checkpoints.write("llama").source
    config = EngineConfig(
        model=str(source.path), device=device, dtype="float32", attention_backend=backend, deterministic=True
    )
    with pytest.raises(ValueError, match=f"deterministic needs a GPU and attention_backend=triton, got {got}"):
        resolve(config, load_model_config(source), source)


def test_the_triton_backend_is_enough(checkpoints: Checkpoints) -> None:
    source = checkpoints.write("llama").source
    config = EngineConfig(model=str(source.path), device="cuda", dtype="bfloat16", deterministic=True)
    assert resolve(config, load_model_config(source), source).deterministic
