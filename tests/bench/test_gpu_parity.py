"""The parity measurement finds equality where there is equality, and says where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks import gpu_parity
from mini_sglang.weights.hub import ModelSource
from tests.tiny import Checkpoints, TinyCheckpoint

PROMPTS = [[5, 6, 7], list(range(10, 40))]


@pytest.fixture(scope="module")
def checkpoint(checkpoints: Checkpoints) -> TinyCheckpoint:
    return checkpoints.write("llama")


def test_both_sides_are_about_as_far_from_float32(checkpoint: TinyCheckpoint) -> None:
    figures = gpu_parity.measure(str(checkpoint.path), PROMPTS, "cpu", 60)
    assert figures["tokens"] == 60
    theirs = figures["transformers_bfloat16"]
    assert 0 < theirs["mean"] < theirs["p99"] <= theirs["max"] < 0.5
    for ours in figures["ours_bfloat16"].values():
        assert 0 < ours["mean"] < 2 * theirs["mean"]
        assert ours["max"] < 3 * theirs["max"]


def test_our_scores_are_those_of_the_same_tokens_at_the_same_places(checkpoint: TinyCheckpoint) -> None:
    """In float32 nothing is left of the distance, decoded or prefilled."""
    model = str(checkpoint.path)
    sequences, decoded = gpu_parity.sample_and_score(model, PROMPTS, "cpu", 40, dtype="float32")
    prefilled = gpu_parity.score_by_prefill(model, sequences, "cpu", dtype="float32")
    exact, _ = gpu_parity.score_by_transformers(model, sequences, "cpu")
    torch.testing.assert_close(decoded, exact, atol=2e-5, rtol=0)
    torch.testing.assert_close(prefilled, exact, atol=2e-5, rtol=0)


def test_other_weights_are_far_away(checkpoint: TinyCheckpoint, checkpoints: Checkpoints) -> None:
    sequences, decoded = gpu_parity.sample_and_score(str(checkpoint.path), PROMPTS, "cpu", 40)
    exact, theirs = gpu_parity.score_by_transformers(str(checkpoints.write("llama", seed=1).path), sequences, "cpu")
    assert gpu_parity.distances(decoded, exact)["mean"] > 10 * gpu_parity.distances(theirs, exact)["mean"]


def test_modes_are_compared_with_the_default(checkpoint: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    model = str(checkpoint.path)
    names = ["overlap on and off", "overlap on and off, no graphs"]
    assert gpu_parity.equal_modes(model, PROMPTS, "cpu", 8) == dict.fromkeys(names, True)
    monkeypatch.setitem(gpu_parity.PAIRS, names[1], ({}, {"dtype": "float32"}))
    assert list(gpu_parity.equal_modes(model, PROMPTS, "cpu", 8).values()) == [True, False]


def test_random_models_are_not_flat(checkpoint: TinyCheckpoint, tmp_path: Path) -> None:
    gpu_parity.write_random_model(checkpoint.path, tmp_path, "cpu")
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.dtype == torch.bfloat16
    logits = model(torch.tensor([list(range(3, 100))])).logits.float()
    assert 2 < logits.std() < 4


def test_the_built_in_model_gives_its_reference_ids(builtin_model: ModelSource) -> None:
    assert gpu_parity.reference_ids_equal("cpu") is True


def test_a_missing_model_file_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINI_SGLANG_CACHE", str(tmp_path))
    figures = gpu_parity.parity(device="cpu", models=(gpu_parity.BUILTIN,))
    assert figures["reference_ids_equal"] == figures["models"][gpu_parity.BUILTIN] == gpu_parity.MISSING
    assert not figures["complete"]
