"""`mini-sglang bench serving` as a command: against a scripted server, and every API against a real one."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mini_sglang.bench import sweep
from mini_sglang.bench.datasets import open_dataset
from mini_sglang.bench.load_generator import arrival_times
from mini_sglang.bench.serving_config import ServingConfig
from mini_sglang.cli import main
from tests.tiny import Checkpoints, run_server

Start = Callable[..., str]
SMALL = ("--num-requests", "12", "--input-length", "10:30", "--output-length", "4", "--warmup", "2")


@pytest.fixture(scope="module")
def own_server(checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of this project's server with a tiny model, which drafts."""
    log = tmp_path_factory.mktemp("server") / "log"
    options = (
        "--model",
        str(checkpoints.write().path),
        "--dtype",
        "float32",
        "--num-pages",
        "64",
        "--speculative",
        "ngram",
    )
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


def search(url: str, folder: Path, *options: str) -> dict[str, Any]:
    """What a sweep that looks for the highest rate writes as JSON."""
    out = folder / "figures.json"
    files = ["--json", str(out), "--plot", str(folder / "curves.png")]
    assert main(["bench", "serving", "--url", url, *SMALL, "--warmup", "0", *options, *files]) == 0
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    figures: dict[str, Any] = json.loads(out.read_text())
    return figures


def check_found(figures: dict[str, Any]) -> None:
    """The rate found is the last one that passed before the first that failed, and that is close."""
    found, rates = figures["highest_rate"], [result["rate"] for result in figures["results"]]
    shares = [result["good_share"] for result in figures["results"]]
    assert rates == sorted(set(rates))
    first_failed = next((index for index, share in enumerate(shares) if share < found["good"]), len(rates))
    sides = [(found["rate"], found["good_share"]), (found["failed_rate"], found["failed_share"])]
    measured = [(None, None), *zip(rates, shares, strict=True), (None, None)]
    assert sides == measured[first_failed : first_failed + 2]
    if None not in (found["rate"], found["failed_rate"]):
        assert found["failed_rate"] <= found["rate"] * 1.05


def test_a_search_finds_what_a_server_with_few_slots_can_do(
    scripted_server: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = scripted_server(ttft_ms=20, itl_ms=10, slots=4)  # 4 at a time, some 50 ms each: at most 80 a second
    options = ["--sweep", "640,20", "--slo", "ttft=150,itl_p99=1000", "--good", "0.9", "--num-requests", "60"]
    figures = search(url, tmp_path, *options)
    check_found(figures)
    found = figures["highest_rate"]
    assert 20 <= found["rate"] < 320
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"highest rate with >= 90 % good: {found['rate']:g} requests/s"
    assert lines[1].startswith(f"at {found['rate']:g} requests/s {found['good_share']:.1%} of 60 requests are good")
    assert lines[3] == "good: ttft <= 150 ms, itl_p99 <= 1000 ms"
    seconds, enough = 60 / found["rate"], max(100, math.ceil(20 * found["rate"]))
    assert lines[4] == f"60 requests are {seconds:.1f} s of it; {enough} would tell whether it lasts"
    assert max(map(len, lines)) <= 80
    assert len({result["input_tokens"]["mean"] for result in figures["results"]}) == 1  # the same work at each rate


def test_a_search_says_that_the_lowest_rate_is_too_high(
    scripted_server: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--sweep", "50,100", "--slo", "ttft=1,e2e=99999", "--good", "0.95"]
    figures = search(scripted_server(ttft_ms=20), tmp_path, *options)
    assert figures["highest_rate"] == {
        "good": 0.95, "rate": None, "good_share": None, "failed_rate": 50, "failed_share": 0,
    }  # fmt: skip
    assert [result["rate"] for result in figures["results"]] == [50, 100]
    text = capsys.readouterr().out
    assert "would tell" not in text
    assert "highest rate with >= 95 % good: none, 50 requests/s is too high already\n" in text


def test_a_search_without_rates_says_that_the_highest_still_passes(
    scripted_server: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--sweep", "--slo", "e2e=99999", "--good", "0.95", "--num-requests", "2"]
    figures = search(scripted_server(ttft_ms=5), tmp_path, *options)
    assert [result["rate"] for result in figures["results"]] == [2**power for power in range(11)]
    assert "highest rate with >= 95 % good: at least 1024 requests/s, the highest measured\n" in capsys.readouterr().out


def test_a_search_on_a_real_server(own_server: str, tmp_path: Path) -> None:
    options = ["--sweep", "10,1000", "--slo", "ttft=60,itl_p99=60", "--good", "0.8", "--vocab", "100:300"]
    check_found(search(own_server, tmp_path, *options))


def test_a_search_of_a_server_that_answers_nothing_ends_at_once(
    own_server: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--sweep", "--slo", "ttft=500", "--good", "0.95", "--num-requests", "2", "--input-length", "5"]
    assert main(["bench", "serving", "--url", own_server, *options, "--model-name", "other"]) == 1
    text = capsys.readouterr().out
    assert "highest rate with >= 95 % good: none, 1 requests/s is too high already" in text
    assert "2 failed: HTTP 404" in text


def test_requests_come_in_the_same_rhythm_at_every_rate(
    scripted_server: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    times: list[Any] = []

    def kept(*arguments: Any) -> Any:
        times.append(arrival_times(*arguments))
        return times[-1]

    monkeypatch.setattr(sweep, "arrival_times", kept)
    options = ["--sweep", "100,200", "--repeats", "2"]
    assert main(["bench", "serving", "--url", scripted_server(ttft_ms=5), *SMALL, *options]) == 0
    assert [list(slow) for slow in times[:2]] == [pytest.approx(2 * fast) for fast in times[2:]]
    assert list(times[0]) != pytest.approx(times[1])


def test_a_rate_is_judged_by_enough_requests() -> None:
    def requests(rate: float, good: float | None, **fields: Any) -> int:
        config = ServingConfig(sweep="1,2", slo="ttft=5", good=good, input_length="5", **fields)
        return len(open_dataset(config)(0)[: config.num_requests_at(rate)])

    assert [requests(rate, 0.95) for rate in (1, 10, 24, 5000)] == [200, 200, 480, 20_000]
    assert [requests(1, good) for good in (0.5, 0.9, 0.99, 1.0)] == [20, 100, 1000, 1000]
    assert requests(24, 0.95, num_requests=7) == 7
    assert requests(24, None) == 100


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


def test_drafts_are_told_of_where_a_server_makes_any(
    own_server: str, scripted_server: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def drafts(url: str) -> dict[str, Any] | None:
        options = ["--concurrency", "1", "--num-requests", "2", "--input-length", "9", "--output-length", "60"]
        greedy = ["--temperature", "0", "--vocab", "100:300", "--warmup", "0", "--json", str(tmp_path / "figures.json")]
        assert main(["bench", "serving", "--url", url, *options, *greedy]) == 0
        [result] = json.loads((tmp_path / "figures.json").read_text())["results"]
        found: dict[str, Any] | None = result["drafts"]
        return found

    found = drafts(own_server)
    text = capsys.readouterr().out
    assert found is not None
    assert 0 < found["num_drafts"] <= 2 * 60
    assert found["acceptance_rate"] == sum(found["num_accepted_at"]) / found["num_draft_tokens"]
    assert f"drafts: {found['num_drafts']} of {found['num_draft_tokens']} tokens" in text
    assert drafts(scripted_server(ttft_ms=1)) is None
    assert "drafts" not in capsys.readouterr().out


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
        (["--sweep"], "sweep needs rates like --sweep 1,2,4, or a search like --sweep --slo ttft=500,itl_p99=50"),
        (["--sweep", "--good", "0.9"], "and --slo, which says what is good, like --slo ttft=500,itl_p99=50"),
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
