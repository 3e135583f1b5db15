"""`mini-sglang bench serving` as a command: against a scripted server, and every API against a real one."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mini_sglang.cli import main
from tests.tiny import Checkpoints, run_server

Start = Callable[..., str]
SMALL = ("--num-requests", "12", "--input-length", "10:30", "--output-length", "4", "--warmup", "2")


@pytest.fixture(scope="module")
def own_server(checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of this project's server with a tiny model."""
    log = tmp_path_factory.mktemp("server") / "log"
    options = ("--model", str(checkpoints.write().path), "--dtype", "float32", "--num-pages", "64")
    with run_server(log, *options) as server:
        yield server.url


def test_a_sweep_prints_tables_and_writes_figures_and_curves(
    scripted_server: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = scripted_server(ttft_ms=10, itl_ms=2)
    files = ["--json", str(tmp_path / "figures.json"), "--plot", str(tmp_path / "curves.png")]
    options = ["--sweep", "50,200", "--repeats", "2", "--slo", "ttft=100000,e2e=1ms", "--api-key", "secret"]
    assert main(["bench", "serving", "--url", url, *SMALL, *options, *files]) == 0
    text = capsys.readouterr().out
    for words in ("50 requests/s, poisson, medians of 2 runs", "TTFT, ms", "12 of 12 requests", "µs of CPU a request"):
        assert words in text
    assert "secret" not in (tmp_path / "figures.json").read_text()
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert [result["rate"] for result in figures["results"]] == [50, 200]
    assert [len(runs) for runs in figures["runs"]] == [2, 2]
    assert figures["results"][0]["goodput"] == 0
    assert figures["results"][0]["cached_share"] > 0.3
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("api", ["completions", "chat", "generate", "sglang"])
def test_every_api_of_this_project_is_measured(
    own_server: str, api: str, tmp_path: Path, checkpoints: Checkpoints
) -> None:
    out = tmp_path / "figures.json"
    options = ["--api", api, "--vocab", "100:300", "--concurrency", "3", "--flush-cache", "--json", str(out)]
    tokenizer = ["--tokenizer", str(checkpoints.write().path)]
    assert main(["bench", "serving", "--url", own_server, *SMALL, *options, *tokenizer]) == 0
    [result] = json.loads(out.read_text())["results"]
    assert (result["num_completed"], result["errors"]) == (12, {})
    assert result["output_tokens"]["mean"] == 4
    assert result["ttft_ms"]["p50"] > 0
    if api != "chat":  # whose template adds to prompts
        assert 10 <= result["input_tokens"]["p50"] <= 30


def test_a_replayed_trace_meets_its_own_blocks_in_the_cache(own_server: str, tmp_path: Path) -> None:
    rows = [
        {"timestamp": 300 * index, "input_length": 1024, "output_length": 64, "hash_ids": [0, index]}
        for index in range(1, 5)
    ]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(map(json.dumps, rows)))
    scale = ["--scale-length", "0.0625", "--speed", "2", "--vocab", "100:300"]
    data = ["--dataset", "trace", "--dataset-path", str(trace), "--replay", *scale]
    out = tmp_path / "figures.json"
    assert main(["bench", "serving", "--url", own_server, *data, "--json", str(out)]) == 0
    [result] = json.loads(out.read_text())["results"]
    assert (result["input_tokens"]["mean"], result["output_tokens"]["mean"]) == (64, 4)
    assert result["cached_tokens"]["mean"] == 24  # 32 of each but the first


def test_a_run_in_which_nothing_succeeds_fails_and_says_why(
    own_server: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--num-requests", "2", "--input-length", "5", "--rate", "inf", "--model-name", "other"]
    assert main(["bench", "serving", "--url", own_server, *options]) == 1
    text = capsys.readouterr().out
    assert "2 failed: HTTP 404" in text
    assert "other" in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "exactly one of --rate"),
        (["--rate", "1", "--plot", "x.png"], "--plot draws curves over rates, so it needs --sweep"),
        (["--rate", "1", "--dataset", "trace", "--dataset-path", "/nowhere"], "No such file"),
        (
            ["--rate", "1", "--url", "http://127.0.0.1:9"],
            "no server answers at http://127.0.0.1:9 (Connection refused)",
        ),
        (["--rate", "1", "--url", "http://127.0.0.1:9"], "start one with mini-sglang serve, or say with --url where"),
        (
            ["--rate", "1", "--url", "http://127.0.0.1:9", "--model-name", "a"],
            "no server answers at http://127.0.0.1:9",
        ),
        (["--rate", "1", "--url", "here"], "url must be like http://127.0.0.1:8000, got 'here'"),
    ],
)
def test_a_mistake_is_one_line(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serving", *options]) == 2
    captured = capsys.readouterr().err
    assert captured.count("\n") == 1
    assert message in captured


def test_a_plot_without_matplotlib_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["bench", "serving", "--sweep", "1", "--plot", "x.png"]) == 2
    assert "--plot needs matplotlib: pip install 'mini-sglang[bench]'" in capsys.readouterr().err


def test_a_load_without_aiohttp_names_the_extra() -> None:
    code = "import sys\nsys.modules['aiohttp'] = None\nfrom mini_sglang.cli import main\nsys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "bench", "serving", "--rate", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "mini-sglang: error: bench serving needs aiohttp: pip install 'mini-sglang[bench]'\n"


def test_a_load_needs_neither_torch_nor_a_server_package(scripted_server: Start) -> None:
    code = (
        "import sys\n"
        "for name in ('torch', 'transformers', 'zmq', 'fastapi', 'uvicorn', 'matplotlib'):\n"
        "    sys.modules[name] = None\n"
        "from mini_sglang.cli import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    command = ["bench", "serving", "--url", scripted_server(ttft_ms=5), *SMALL, "--rate", "100"]
    done = subprocess.run([sys.executable, "-c", code, *command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
