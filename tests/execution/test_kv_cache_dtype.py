"""With `kv_cache_dtype=fp8` an engine is the model whose keys and values are rounded to float8, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache

from tests.tiny import Checkpoints, generate_ids, greedy_ids, make_ragged_prompts, run_engine


class RoundedCache(DynamicCache):  # type: ignore[misc]  # transformers has no types
    """What attention sees of keys and values has been through float8."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *where: Any, **options: Any) -> Any:
        rounded = [states.to(torch.float8_e4m3fn).to(states.dtype) for states in (key_states, value_states)]
        return super().update(*rounded, *where, **options)


def greedy_of_rounded(model: Any, prompt: list[int], num_tokens: int) -> list[int]:
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        for _ in range(num_tokens):
            logits = model(ids, past_key_values=RoundedCache(), use_cache=True).logits
            ids = torch.cat((ids, logits[:, -1:].argmax(-1)), 1)
    return ids[0, len(prompt) :].tolist()


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated")  # its new name is not in all of transformers 5
def test_tokens_are_those_of_a_model_with_rounded_keys_and_values(checkpoints: Checkpoints) -> None:
    """In a batch, in chunks, and behind shared prefixes that are copied inside a page."""
    checkpoint = checkpoints.write("qwen3")
    prompts = make_ragged_prompts(12, checkpoint.model.config.vocab_size)
    with run_engine(checkpoint.path, kv_cache_dtype="fp8", max_prefill_tokens=32, context_length=256) as engine:
        outputs = generate_ids(engine, prompts, arrivals=2, num_tokens=10)
        assert engine.config.attention_backend == "reference"
    assert outputs == [greedy_of_rounded(checkpoint.model, prompt, 10) for prompt in prompts]
    assert outputs != [greedy_ids(checkpoint.model, prompt, 10) for prompt in prompts], "float8 made no difference"


def test_the_same_memory_holds_four_times_the_pages_of_float32(checkpoints: Checkpoints) -> None:
    path = checkpoints.write("llama").path
    pages = {}
    for dtype in ("auto", "fp8"):
        with run_engine(path, kv_cache_dtype=dtype, kv_cache_bytes=1 << 20) as engine:
            pages[dtype] = engine.config.num_pages
    assert pages["fp8"] == 4 * pages["auto"]


def test_the_cpu_backend_refuses_it(checkpoints: Checkpoints) -> None:
    with (
        pytest.raises(ValueError, match="attention_backend=cpu does not support kv_cache_dtype=fp8"),
        run_engine(checkpoints.write("llama").path, kv_cache_dtype="fp8", attention_backend="cpu"),
    ):
        pass
