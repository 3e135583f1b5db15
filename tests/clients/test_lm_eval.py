"""lm-eval: 20 questions scored from log-probabilities, here and by transformers, and answers that are generated."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mini_sglang.weights.hub import ModelSource
from tests.tiny import RunningServer

pytest.importorskip("lm_eval")

ROOT = Path(__file__).parents[2]
TASKS = Path(__file__).parent / "data"


def evaluate(folder: Path, model: str, arguments: str, task: str, *more: str) -> tuple[dict[str, Any], list[Any]]:
    """The scores of a run of the command, and what it got for each question, in order."""
    command = f"{sys.executable} -m lm_eval --model {model} --model_args {arguments} --tasks {task}".split()
    files = ("--include_path", str(TASKS), "--output_path", str(folder / model), "--log_samples")
    # one thread: for steps this small, several wait for each other where the cores are busy
    environment = {**os.environ, "HF_HOME": str(folder), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        (*command, *files, *more), capture_output=True, text=True, env=environment, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr
    [results] = (folder / model).rglob("results*.json")
    [samples] = (folder / model).rglob("samples*.jsonl")
    rows = sorted(map(json.loads, samples.read_text().splitlines()), key=lambda row: int(row["doc_id"]))
    return json.loads(results.read_text())["results"][task], [row["filtered_resps"] for row in rows]


def test_the_score_equals_that_of_transformers(
    server: RunningServer, builtin_model: ModelSource, tmp_path: Path
) -> None:
    pytest.importorskip("accelerate")
    url = f"model=smollm2-135m,base_url={server.url}/v1/completions"
    own_scores, own = evaluate(tmp_path, "local-completions", url, "mini_choices", "--batch_size", "4")
    file = f"pretrained={builtin_model.path.parent},gguf_file={builtin_model.path.name},dtype=float32"
    scores, expected = evaluate(tmp_path, "hf", file, "mini_choices", "--device", "cpu")
    assert len(own) == len(expected) == 20
    for name in ("acc,none", "acc_norm,none"):
        assert own_scores[name] == scores[name] > 0.5
    for of_choices, expected_of_choices in zip(own, expected, strict=True):
        for (logprob, is_greedy), (expected_logprob, expected_greedy) in zip(
            of_choices, expected_of_choices, strict=True
        ):
            assert float(logprob) == pytest.approx(float(expected_logprob), abs=1e-3)
            assert str(is_greedy) == str(expected_greedy)


def test_a_chat_generates_answers(server: RunningServer, tmp_path: Path) -> None:
    url = f"model=smollm2-135m,base_url={server.url}/v1/chat/completions"
    scores, answers = evaluate(
        tmp_path, "local-chat-completions", url, "mini_answers", "--apply_chat_template", "--limit", "3"
    )
    assert len(answers) == 3
    assert 0 <= scores["exact_match,none"] <= 1
    asked = [{"role": "user", "content": "The capital of France is"}]
    body = {"messages": asked, "max_tokens": 4, "temperature": 0, "stop": ["."]}
    message = server.post("/v1/chat/completions", **body).json()["choices"][0]["message"]
    assert answers[0] == [message["content"]]
