"""The command line: options come from the configuration, mistakes are one line and status 2."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from mini_sglang.cli import main
from mini_sglang.config import EngineConfig
from mini_sglang.execution import worker_main
from mini_sglang.execution.executor import Executor
from mini_sglang.server.config import ServerConfig
from mini_sglang.weights.hub import ModelSource
from tests.tiny import Checkpoints

TINY = ["--dtype", "float32", "--num-pages", "16", "--num-threads", "1"]
GREEDY = ["--temperature", "0", "--max-tokens", "5", "--ignore-eos"]


@pytest.fixture
def tiny_model(checkpoints: Checkpoints) -> Path:
    path: Path = checkpoints.write("llama").path
    return path


def run(arguments: list[str]) -> int:
    """The exit status, whether `main` returns it or leaves by SystemExit as argparse does."""
    try:
        return main(arguments)
    except SystemExit as error:
        return int(error.code or 0)


@pytest.mark.parametrize("command", ["serve", "chat", "generate", "verify", "pull"])
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([command, "--help"]) == 0
    assert "smollm2-135m" in capsys.readouterr().out


def test_serve_has_an_option_with_help_for_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["serve", "--help"]) == 0
    text = capsys.readouterr().out
    for field in [*dataclasses.fields(EngineConfig), *dataclasses.fields(ServerConfig)]:
        assert f"--{field.name.replace('_', '-')}" in text
        assert field.metadata["help"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "COMMAND"),
        (["nonsense"], "nonsense"),
        (["generate", "--max-tokens", "x"], "--max-tokens"),
        (["generate", "-p", "a", "--max-tokens", "0"], "max_tokens must be at least 1"),
        (["generate", "-p", "a", "--temperature", "nan"], "temperature must be a finite number"),
        (["generate", "-p", "a", "--page-size", "0"], "page_size must be an integer of at least 1"),
        (["generate", "-p", "a", "--dtype", "int3"], "--dtype"),
        (["generate", "-p", "a", "one", "--model", "two"], "model was given twice"),
        (["generate", "-p", "a", "./no-such-folder"], "no-such-folder"),
        (["serve", "--port", "70000"], "port must be between 0 and 65535"),
        (["serve", "--no-such-option"], "--no-such-option"),
        (["verify", "./no-such-folder"], "no-such-folder"),
        (["pull", "./no-such-folder"], "no-such-folder"),
        (["quantize", "./no-such-folder", "out", "--to", "fp8"], "no-such-folder"),
        (["quantize", "smollm2-135m", "out"], "--to"),
        (["quantize", "smollm2-135m", "out", "--to", "int3"], "int3"),
        (["quantize", "smollm2-135m", "--to", "fp8"], "OUT"),
        (["quantize", "smollm2-135m", "out", "--to", "fp8"], "is a GGUF file"),
    ],
)
def test_a_mistake_is_one_line_on_stderr_and_status_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert message in captured.err


def test_another_rank_s_failure_is_one_line_and_status_1(
    tiny_model: Path, thread_workers: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*arguments: object, **settings: object) -> None:
        raise ValueError("out of GPU memory")

    monkeypatch.setattr(worker_main, "Worker", fail)
    assert run(["generate", str(tiny_model), "-p", "a", "--tp", "2", *TINY]) == 1
    assert capsys.readouterr().err.endswith("mini-sglang: error: rank 1 failed: out of GPU memory\n")


def test_generate_prints_the_text_and_as_json_all_of_it(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["generate", str(tiny_model), "-p", "Once upon", *TINY, *GREEDY]
    assert run(arguments) == 0
    text = capsys.readouterr().out
    assert run([*arguments, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert text == answer["text"] + "\n"
    assert (answer["prompt"], len(answer["token_ids"]), answer["finish_reason"]) == ("Once upon", 5, "length")
    assert answer["usage"]["completion_tokens"] == 5


def test_generate_fails_with_status_1_where_a_step_fails(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*arguments: object) -> None:
        raise MemoryError("no memory for this step")

    monkeypatch.setattr(Executor, "launch", fail)
    assert run(["generate", str(tiny_model), "-p", "a", *TINY]) == 1
    assert capsys.readouterr().err.endswith("mini-sglang: error: MemoryError: no memory for this step\n")


def test_generate_refuses_an_empty_prompt(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", str(tiny_model), "-p", "", *TINY]) == 2
    assert (
        capsys.readouterr().err.splitlines()[-1].startswith("mini-sglang: error: prompt must hold at least one token")
    )


def test_the_module_reads_a_prompt_from_a_pipe_and_obeys_a_closed_one(tiny_model: Path) -> None:
    command = [sys.executable, "-m", "mini_sglang", "generate", str(tiny_model), *TINY, *GREEDY]
    done = subprocess.run(command, input="Once upon", capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("\n")


def test_model_and_shell_options_are_the_chat_command(tiny_model: Path) -> None:
    command = [sys.executable, "-m", "mini_sglang", "--model", str(tiny_model), "--shell", *TINY, "--max-tokens", "4"]
    done = subprocess.run(command, input="/help\nhello\n", capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "/reset" in done.stdout


def test_pull_prints_where_the_model_lies(builtin_model: ModelSource, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["pull", "smollm2-135m"]) == 0
    assert capsys.readouterr().out.strip() == str(builtin_model.path)


def test_verify_succeeds_on_a_model_that_agrees(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["verify", str(tiny_model), "--max-tokens", "4", "--num-pages", "64", "--num-threads", "1"]) == 0
    assert "equal to transformers on all prompts" in capsys.readouterr().out
