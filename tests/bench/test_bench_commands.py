"""`mini-sglang bench` on a CPU: tables on stdout, all figures in JSON, mistakes in one line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mini_sglang.cli import main
from mini_sglang.weights.hub import resolve_model
from tests.tiny import Checkpoints

ENGINE = ["--dtype", "float32", "--num-pages", "64", "--num-threads", "1"]
CEILINGS = ["--copy-tb-s", "0.02", "--gemm-tflop-s", "0.1"]


@pytest.fixture
def shape(checkpoints: Checkpoints, tmp_path: Path) -> str:
    """A folder with nothing but a config.json."""
    folder = tmp_path / "shape"
    folder.mkdir()
    (folder / "config.json").write_text((checkpoints.write("qwen3").path / "config.json").read_text())
    return str(folder)


def test_offline_reports_throughput_beside_the_floor(
    shape: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "offline.json"
    sizes = ["--sequences", "3", "--shortest", "5", "--longest", "9", "--runs", "2"]
    assert main(["bench", "offline", shape, *sizes, *ENGINE, *CEILINGS, "--json", str(out)]) == 0
    text = capsys.readouterr().out
    assert "Offline throughput" in text
    assert "Roofline" in text
    figures = json.loads(out.read_text())
    assert figures["config"]["load_format"] == "dummy"
    assert figures["tokens_per_second"] == max(run["tokens_per_second"] for run in figures["runs"])
    assert figures["ceilings"] == {"bytes_per_second": 0.02e12, "flops_per_second": 0.1e12}
    seconds = min(run["seconds"] for run in figures["runs"])
    assert figures["of_floor"] == pytest.approx(figures["floor_s"] / seconds)
    assert {"device", "date", "torch", "python"} <= set(figures["machine"])


def test_latency_measures_the_ceilings_where_none_are_given(
    shape: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "latency.json"
    assert main(["bench", "latency", shape, "--input", "6", "--output", "4", *ENGINE, "--json", str(out)]) == 0
    assert "first token" in capsys.readouterr().out
    figures = json.loads(out.read_text())
    assert figures["config"]["context_length"] == 10
    assert figures["first_token_ms"] > 0
    assert (figures["batch"], figures["input"], figures["output"]) == (1, 6, 4)
    assert figures["ceilings"]["bytes_per_second"] > 1e8


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["offline", "--runs", "0"], "must be at least 1, got 0"),
        (["offline", "--shortest", "9", "--longest", "8"], "shortest must be at most longest"),
        (["offline", "--profile-steps", "9"], "--profile-steps 9 says how long to profile, so it needs --profile"),
        (["latency", "--batch", "x"], "--batch"),
        (["offline", "--copy-tb-s", "0"], "--copy-tb-s: must be a finite number above 0, got 0"),
        (["latency", "--gemm-tflop-s", "nan"], "--gemm-tflop-s: must be a finite number above 0, got nan"),
        (["kernels", "--only", "everything"], "everything"),
        ([], "WHAT"),
        pytest.param(
            ["offline", "--profile"],
            "--profile needs an NVIDIA GPU",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
        pytest.param(
            ["kernels"],
            "bench kernels needs an NVIDIA GPU",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
    ],
)
def test_a_mistake_is_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = main(["bench", *arguments])
    except SystemExit as error:
        status = int(error.code or 0)
    assert status == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert message in captured.err


@pytest.mark.parametrize("what", ["offline", "latency", "kernels"])
def test_help_names_random_weights_as_the_default(what: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", what, "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "random weights from the config alone (default: dummy)" in text


def test_a_benchmark_needs_neither_server_nor_shell(shape: str) -> None:
    """So that it runs where their packages are missing."""
    code = (
        "import sys\n"
        "for name in ('zmq', 'fastapi', 'uvicorn', 'pydantic', 'prompt_toolkit', 'prometheus_client'):\n"
        "    sys.modules[name] = None\n"
        "from mini_sglang.cli import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    arguments = ["bench", "latency", shape, "--input", "4", "--output", "2", *ENGINE, *CEILINGS]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["qwen3-0.6b", "qwen3-8b", "llama-3.2-1b"])
def test_the_shapes_in_the_repository_are_models(name: str) -> None:
    shapes = Path(__file__).parents[2] / "benchmarks" / "shapes"
    assert resolve_model(str(shapes / name), weights_needed=False).path == shapes / name
