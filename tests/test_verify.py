"""`verify` finds equality where there is equality, and says where there is none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mini_sglang import EngineConfig
from mini_sglang.learn import contract
from mini_sglang.verify import (
    CONTRACT_IDS,
    PROMPTS,
    Comparison,
    compare,
    load_reference,
    reference_greedy,
    verify_model,
)
from mini_sglang.weights.hub import ModelSource
from tests.tiny import Checkpoints, TinyCheckpoint
from tests.weights.quantized import FORMATS
from tests.weights.quantized import write as write_quantized


def config_of(checkpoint: TinyCheckpoint) -> EngineConfig:
    return EngineConfig(model=str(checkpoint.path), num_pages=64, num_threads=1)


def test_the_reference_for_the_builtin_model_is_the_recorded_one(builtin_model: ModelSource) -> None:
    recorded = json.loads((Path(__file__).parent / "data" / "smollm2_reference.json").read_text())["cases"][0]
    ids, margins = reference_greedy(load_reference(builtin_model), recorded["prompt_ids"], 8)
    assert ids == recorded["output_ids_ignore_eos"][:8]
    assert margins == pytest.approx(recorded["top2_margins"][:8], abs=1e-3)


def test_the_contracts_ids_are_recorded_once_and_again() -> None:
    recorded = json.loads((Path(__file__).parent / "data" / "smollm2_reference.json").read_text())["cases"][0]
    assert recorded["prompt"] == contract.PROMPT == PROMPTS["capital"]
    assert CONTRACT_IDS["smollm2-135m"] == contract.TOKEN_IDS == recorded["output_ids_ignore_eos"][:20]


def test_a_model_that_is_equal_to_transformers_but_not_as_recorded_is_found_out(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, lines = checkpoints.write("llama"), list[str]()
    monkeypatch.setitem(CONTRACT_IDS, checkpoint.path.name.lower(), [-1, -2])
    assert not verify_model(config_of(checkpoint), max_tokens=4, report=lines.append)
    assert "  recorded      DIFFERENT: [-1, -2]" in lines
    assert "DIFFERENT" in lines[-1]


def test_a_quantised_folder_equals_transformers_on_its_dequantised_weights(checkpoints: Checkpoints) -> None:
    lines: list[str] = []
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 72}
    checkpoint = write_quantized(checkpoints, FORMATS["gptq, groups of 32"], "qwen3_moe", **experts)
    assert verify_model(config_of(checkpoint), max_tokens=6, report=lines.append)
    assert sum(line.endswith(": equal") for line in lines) == len(PROMPTS)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_folder_of_safetensors_equals_transformers(checkpoints: Checkpoints, family: str) -> None:
    lines: list[str] = []
    assert verify_model(config_of(checkpoints.write(family)), max_tokens=6, report=lines.append)
    assert sum(line.endswith(": equal") for line in lines) == len(PROMPTS) >= 13


@pytest.mark.parametrize(
    ("family", "rope", "tied"),
    [("llama", "llama3", False), ("llama", "yarn", True), ("qwen2", "linear", False), ("smollm3", "linear", True)],
)
def test_a_gguf_file_equals_transformers_with_our_weights(
    checkpoints: Checkpoints, family: str, rope: str, tied: bool
) -> None:
    checkpoint = checkpoints.write_gguf(family, kind="Q8_0", rope=rope, tie_word_embeddings=tied, num_hidden_layers=4)
    assert verify_model(config_of(checkpoint), max_tokens=6, report=lambda line: None)


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
        (
            "qwen3_moe",
            {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True},
        ),
    ],
)
def test_a_gguf_file_of_a_mixture_equals_transformers_with_our_weights(
    checkpoints: Checkpoints, family: str, settings: dict[str, Any]
) -> None:
    checkpoint = checkpoints.write_gguf(family, kind="Q8_0", **settings)
    assert verify_model(config_of(checkpoint), max_tokens=6, report=lambda line: None)


def test_prompts_leave_room_in_a_short_context(checkpoints: Checkpoints) -> None:
    config = config_of(checkpoints.write("llama")).replace(context_length=64)
    assert verify_model(config, max_tokens=6, report=lambda line: None)
    with pytest.raises(ValueError, match="max_tokens must be below the context length 64, got 64"):
        verify_model(config, max_tokens=64)


def test_other_weights_are_found_out(checkpoints: Checkpoints) -> None:
    ours, other = checkpoints.write("llama", seed=0), checkpoints.write("llama", seed=1)
    [comparison] = compare(config_of(ours), other.source, {"prompt": [5, 6, 7]}, 6)
    assert comparison.first_difference is not None


def test_other_weights_fail_the_whole_verification(checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, other = checkpoints.write("llama", seed=0), checkpoints.write("llama", seed=1)
    monkeypatch.setattr("mini_sglang.verify.load_reference", lambda source: load_reference(other.source))
    lines: list[str] = []
    assert not verify_model(config_of(ours), max_tokens=6, report=lines.append)
    assert "DIFFERENT" in lines[-1]
    [difference] = [line for line in lines if "differs" in line][:1]
    assert "where the best logit leads the second by" in difference


def test_the_first_difference_is_the_first() -> None:
    comparison = Comparison("p", [5, 6, 7, 8], [5, 6, 9, 9], [0.1, 0.2, 0.3, 0.4])
    assert comparison.first_difference == 2
    assert Comparison("p", [5], [5], [0.1]).first_difference is None
