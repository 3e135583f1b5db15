"""Out of memory at start-up is an error that says which setting to lower, and leaves the device usable."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from tests.gpu.conftest import Expected, run_on_gpu
from tests.tiny import Checkpoints, TinyCheckpoint, generate_ids

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mem_fraction": 1e-6}, "mem_fraction 1e-06 leaves .* raise it or lower .* or max_running_requests"),
        ({"num_pages": 2_000_000_000}, "out of GPU memory: .*num_pages"),
        ({"max_running_requests": 500_000_000}, "out of GPU memory: .*max_running_requests"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    tiny_model: TinyCheckpoint, expected: Expected, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message), run_on_gpu(tiny_model.path, **settings):
        pass
    with run_on_gpu(tiny_model.path, num_pages=64) as engine:
        assert generate_ids(engine, [[5, 6, 7]], num_tokens=6) == [expected([5, 6, 7], 6)]


def test_weights_that_do_not_fit_are_refused(checkpoints: Checkpoints) -> None:
    path = checkpoints.write("llama", hidden_size=512, intermediate_size=1536).path  # 16 MB
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    try:
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (4 << 20)) / total)
        with pytest.raises(ValueError, match="weights do not fit: use a smaller model or dtype"), run_on_gpu(path):
            pass
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_the_pool_is_sized_to_the_memory_that_is_left(tiny_model: TinyCheckpoint) -> None:
    """Whatever `mem_fraction` leaves, but never more than all requests at full length can use."""
    with run_on_gpu(tiny_model.path) as engine:
        assert engine.stats().num_pages == 16 * 256 // engine.config.page_size


def test_a_closed_engine_gives_its_memory_back(tiny_model: TinyCheckpoint) -> None:
    def used() -> int:
        gc.collect()
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    def turn() -> None:
        with run_on_gpu(tiny_model.path, num_pages=20_000) as engine:
            generate_ids(engine, [[5, 6, 7]], num_tokens=3)

    turn()
    before = used()
    turn()
    assert used() - before < 1 << 20
