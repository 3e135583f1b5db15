"""What is left open follows from the machine: the pool of a CPU from the memory that is available."""

from __future__ import annotations

import pytest

from mini_sglang.config import EngineConfig
from mini_sglang.execution import resolve as module
from mini_sglang.execution.resolve import page_bytes, resolve
from mini_sglang.weights.hub import find_model
from mini_sglang.weights.model_config import load_model_config
from tests.tiny import Checkpoints

CONTEXT, PAGE, SLOTS = 256, 16, 8
PAGES_OF_ONE = CONTEXT // PAGE


@pytest.mark.parametrize(
    ("available_pages", "pages"),
    [
        (32 * 100, 100),  # a share
        (32 * 10_000, SLOTS * PAGES_OF_ONE),  # no more than all requests at full length can use
        (8 * PAGES_OF_ONE, PAGES_OF_ONE + 1),  # room for one request at full length
        (20, 5),  # but no more than a quarter
        (1, 2),  # and never less than an engine needs
    ],
)
def test_the_pool_is_a_share_of_the_memory_available(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch, available_pages: int, pages: int
) -> None:
    config = EngineConfig(
        model=str(checkpoints.write().path), device="cpu", dtype="float32", max_running_requests=SLOTS, page_size=PAGE
    )
    source = find_model(config)
    model = load_model_config(source)
    monkeypatch.setattr(module, "available_memory", lambda: available_pages * page_bytes(config, model, "float32"))
    assert resolve(config, model, source).num_pages == pages
