"""With `quantization` an engine computes with what `mini-sglang quantize` would have written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mini_sglang.quantize import Format, quantize_model
from tests.tiny import Checkpoints, generate_ids, make_ragged_prompts, run_engine
from tests.weights.quantized import FORMATS
from tests.weights.quantized import write as write_quantized

SIZES: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "head_dim": 32}


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "norm_topk_prob": True}


@pytest.mark.parametrize("kind", ["fp8", "fp8-block", "w4a16"])
@pytest.mark.parametrize(("family", "more"), [("llama", {}), ("qwen3_moe", EXPERTS)], ids=["dense", "experts"])
def test_the_same_as_from_a_quantised_folder(
    checkpoints: Checkpoints, tmp_path: Path, family: str, more: dict[str, Any], kind: Format
) -> None:
    checkpoint = checkpoints.write(family, **SIZES, **more)
    quantize_model(checkpoint.source, tmp_path / "quantised", kind)
    prompts = make_ragged_prompts(6, checkpoint.model.config.vocab_size)
    with run_engine(checkpoint.path) as engine:
        dense = generate_ids(engine, prompts)
    with run_engine(tmp_path / "quantised") as engine:
        wanted = generate_ids(engine, prompts)
    with run_engine(checkpoint.path, quantization=kind) as engine:
        assert generate_ids(engine, prompts) == wanted
    assert wanted != dense


def test_a_quantised_checkpoint_is_not_quantised_again(checkpoints: Checkpoints) -> None:
    folder = write_quantized(checkpoints, next(iter(FORMATS.values()))).path
    with (
        pytest.raises(ValueError, match="quantization must be none for a checkpoint that is quantised, got fp8"),
        run_engine(folder, quantization="fp8"),
    ):
        pass
