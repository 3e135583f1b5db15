"""The command `llm` with a file extra-openai-models.yaml, as in docs/api.md."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tiny import RunningServer

pytest.importorskip("llm")

MODELS = """\
- model_id: mini
  model_name: smollm2-135m
  api_base: {url}/v1
  supports_schema: true
  supports_tools: true
- model_id: mini-completion
  model_name: smollm2-135m
  api_base: {url}/v1
  completion: true
"""
GREEDY = ("-o", "temperature", "0", "-o", "max_tokens")


@pytest.fixture
def llm_command(server: RunningServer, tmp_path: Path) -> Callable[..., str]:
    """`llm_command(*arguments)` → what the command prints."""
    (tmp_path / "extra-openai-models.yaml").write_text(MODELS.format(url=server.url))

    def run(*arguments: str) -> str:
        environment = {**os.environ, "LLM_USER_PATH": str(tmp_path)}
        done = subprocess.run(
            (sys.executable, "-m", "llm", *arguments), capture_output=True, text=True, env=environment, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def test_a_chat_plain_streamed_and_continued(llm_command: Callable[..., str], question: str, answer: str) -> None:
    assert llm_command("-m", "mini", *GREEDY, "8", question).rstrip("\n") == answer
    assert llm_command("-m", "mini", "--no-stream", *GREEDY, "8", question).rstrip("\n") == answer
    assert llm_command("-c", *GREEDY, "8", "And another?").strip()


def test_a_schema(llm_command: Callable[..., str]) -> None:
    properties = {"name": {"type": "string", "maxLength": 12}}
    schema = {"type": "object", "properties": properties, "required": ["name"], "additionalProperties": False}
    written = llm_command("-m", "mini", "--schema", json.dumps(schema), *GREEDY, "64", "A colour")
    assert list(json.loads(written)) == ["name"]


def test_tools_are_offered_and_completions_made(llm_command: Callable[..., str]) -> None:
    assert llm_command("-m", "mini", "-T", "llm_time", *GREEDY, "16", "Say hello.").strip()
    assert llm_command("-m", "mini-completion", *GREEDY, "2", "The capital of France is").strip() == "Paris."
