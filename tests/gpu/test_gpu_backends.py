"""Whole engines on a GPU with a float8 cache, and with the optional attention backends where they are installed."""

from __future__ import annotations

import pytest

from tests.gpu.conftest import run_on_gpu
from tests.tiny import Checkpoints, TinyCheckpoint, generate_ids, make_ragged_prompts

pytestmark = pytest.mark.gpu


def test_a_float8_cache_changes_nothing_between_graphs_and_none(tiny_model: TinyCheckpoint) -> None:
    prompts = make_ragged_prompts(12, tiny_model.model.config.vocab_size)
    outputs = []
    for graph_rows in (None, 0):
        with run_on_gpu(tiny_model.path, kv_cache_dtype="fp8", cuda_graph_max_bs=graph_rows) as engine:
            outputs.append(generate_ids(engine, prompts, num_tokens=10))
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
@pytest.mark.parametrize(
    ("names", "graph_rows"), [("flashinfer", 0), ("triton,flashinfer", 0), ("flashinfer,triton", 16)]
)
def test_flashinfer_begins_answers_as_triton_does(
    checkpoints: Checkpoints, names: str, graph_rows: int, kv_cache_dtype: str
) -> None:
    """In bfloat16, where one of two nearly equal tokens may win here and the other there: in few answers."""
    pytest.importorskip("flashinfer")
    checkpoint = checkpoints.write("qwen3", head_dim=128)
    prompts = make_ragged_prompts(12, checkpoint.model.config.vocab_size)
    outputs = []
    for backend in ("triton", names):
        settings = {"attention_backend": backend, "kv_cache_dtype": kv_cache_dtype, "dtype": "bfloat16"}
        with run_on_gpu(checkpoint.path, **settings) as engine:
            outputs.append(generate_ids(engine, prompts, arrivals=3, num_tokens=8))
            graphs = engine.config.cuda_graph_max_bs
    assert graphs == graph_rows
    assert sum(ours[:2] == theirs[:2] for ours, theirs in zip(*outputs, strict=True)) >= 10


def test_graphs_are_refused_where_decodes_are_planned_on_the_host(tiny_model: TinyCheckpoint) -> None:
    with (
        pytest.raises(ValueError, match="cuda_graph_max_bs must be 0 with reference as decode attention backend"),
        run_on_gpu(tiny_model.path, attention_backend="reference", cuda_graph_max_bs=8),
    ):
        pass
