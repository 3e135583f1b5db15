"""`mini-sglang simulate` as a command, and that it sends what `bench serving` sends."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mini_sglang.cli import main
from mini_sglang.simulate.cost import ReplicaCost, load_cost
from tests.bench.conftest import scripted_server  # noqa: F401
from tests.simulate.test_cost import write_log

RANDOM = ("--input-length", "20:200", "--output-length", "2:20", "--num-requests", "40")


@pytest.fixture
def cost_file(tmp_path: Path, cost: ReplicaCost) -> str:
    cost.save(tmp_path / "cost.json")
    return str(tmp_path / "cost.json")


@pytest.fixture
def trace(tmp_path: Path) -> str:
    """60 requests in a minute, of 10 chats: Mooncake's format, with two blocks that all share."""
    lines = []
    for number in range(60):
        chat, turn = number % 10, number // 10
        blocks = [0, 1, *(100 * (chat + 1) + block for block in range(turn + 1))]
        lines.append(
            {"timestamp": number * 1000, "input_length": 512 * len(blocks), "output_length": 20, "hash_ids": blocks}
        )
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def simulate(tmp_path: Path, *words: str) -> dict[str, Any]:
    out = tmp_path / "figures.json"
    assert main(["simulate", *words, "--json", str(out)]) == 0
    figures: dict[str, Any] = json.loads(out.read_text())
    return figures


def test_a_trace_is_replayed_at_its_own_times_on_several_replicas(
    tmp_path: Path, cost_file: str, trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (trace, "--cost", cost_file, "--scale-length", "0.1", "--replicas", "3", "--price", "2")
    figures = simulate(tmp_path, *words, "--routing", "prefix", "--slo", "ttft=1000")
    text = capsys.readouterr().out
    for part in ("3 replicas, trace at 1 times its speed", "TTFT, ms", "cached", "goodput", "cost: ", "busy"):
        assert part in text
    [result], [fleet] = figures["results"], figures["fleets"]
    assert (result["num_completed"], fleet["replicas"]) == (60, 3)
    assert 59 < fleet["seconds"] < 70
    assert fleet["cost"] == pytest.approx(2 * 3 * fleet["seconds"] / 3600)
    assert result["cached_share"] > 0.5
    again = simulate(tmp_path, *words, "--routing", "round_robin")
    assert again["results"][0]["cached_share"] < result["cached_share"]


def test_a_sweep_shows_rates_side_by_side_and_draws_them(
    tmp_path: Path, cost_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    plot = tmp_path / "curves.png"
    figures = simulate(tmp_path, "--cost", cost_file, *RANDOM, "--sweep", "2,20,200", "--plot", str(plot))
    assert "sent/s" in capsys.readouterr().out
    medians = [result["ttft_ms"]["p50"] for result in figures["results"]]
    assert medians == sorted(medians)
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_a_search_finds_the_highest_rate_that_is_good(tmp_path: Path, cost_file: str) -> None:
    slo = ("--slo", "ttft=200", "--good", "0.9", "--sweep")
    figures = simulate(tmp_path, "--cost", cost_file, *RANDOM, *slo)
    highest = figures["highest_rate"]
    assert highest["good_share"] >= 0.9 > highest["failed_share"]
    assert highest["failed_rate"] <= highest["rate"] * 1.05


def test_the_fewest_replicas_that_keep_a_limit_are_found_and_drawn(
    tmp_path: Path, cost_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    load = ("--cost", cost_file, *RANDOM, "--rate", "100")
    plot = tmp_path / "replicas.png"
    figures = simulate(tmp_path, *load, "--find-replicas", "ttft_p99<150ms", "--plot", str(plot))
    enough = figures["enough"]
    assert enough > 1
    assert f"{enough} replicas are enough" in capsys.readouterr().out
    assert plot.read_bytes().startswith(b"\x89PNG")
    for tried in figures["tried"]:
        assert tried["met"] == (tried["result"]["ttft_ms"]["p99"] <= 150) == (tried["fleet"]["replicas"] >= enough)
    assert simulate(tmp_path, *load, "--replicas", str(enough))["results"][0]["ttft_ms"]["p99"] <= 150
    assert simulate(tmp_path, *load, "--replicas", str(enough - 1))["results"][0]["ttft_ms"]["p99"] > 150


def test_a_limit_that_no_fleet_keeps_fails(cost_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    load = ("--cost", cost_file, "--num-requests", "2", "--rate", "1")
    assert main(["simulate", *load, "--find-replicas", "ttft_p50<1ms"]) == 1
    assert "1000 replicas are too few" in capsys.readouterr().out


def test_a_log_is_fitted_and_what_was_found_can_be_carried(tmp_path: Path) -> None:
    write_log(tmp_path / "log", 100, on_gpu=True)
    load = ("--rate", "5", *RANDOM)
    fitted = simulate(tmp_path, "--step-log", str(tmp_path / "log"), "--save-cost", str(tmp_path / "saved"), *load)
    carried = simulate(tmp_path, "--cost", str(tmp_path / "saved"), *load)
    assert carried["results"] == fitted["results"]


def test_settings_of_a_replica_can_be_others_than_the_logs(tmp_path: Path, cost_file: str) -> None:
    load = ("--cost", cost_file, *RANDOM, "--rate", "inf")
    figures = simulate(tmp_path, *load, "--max-running-requests", "2", "--save-cost", str(tmp_path / "saved"))
    assert load_cost(tmp_path / "saved").settings["max_running_requests"] == 2
    assert figures["results"][0]["ttft_ms"]["p50"] > 2 * simulate(tmp_path, *load)["results"][0]["ttft_ms"]["p50"]


@pytest.mark.parametrize("how", [("--sweep", "50,200", "--repeats", "2"), ("--concurrency", "4")])
def test_it_sends_what_bench_serving_sends(
    tmp_path: Path,
    cost_file: str,
    scripted_server: Callable[..., str],  # noqa: F811
    how: tuple[str, ...],
) -> None:
    url, out = scripted_server(ttft_ms=1, itl_ms=0.1), tmp_path / "measured.json"
    assert main(["bench", "serving", "--url", url, "--warmup", "0", *RANDOM, *how, "--json", str(out)]) == 0
    measured, simulated = json.loads(out.read_text()), simulate(tmp_path, "--cost", cost_file, *RANDOM, *how)
    assert len(measured["results"]) == len(simulated["results"])
    for of_server, of_fleet in zip(measured["results"], simulated["results"], strict=True):
        for name in ("rate", "num_requests", "input_tokens", "output_tokens"):
            assert of_server[name] == of_fleet[name]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--rate", "1"), "give one of --step-log, --latency and --cost"),
        (("t.jsonl", "--cost", "c", "--dataset", "random"), "TRACE is the data set"),
        (("--cost", "c", "--rate", "1", "--dataset", "sharegpt", "--dataset-path", "x"), "prompts of token ids"),
        (("--cost", "c"), "exactly one of --rate"),
        (("--cost", "c", "--rate", "1", "--replicas", "1001"), "between 1 and 1000"),
        (("--cost", "c", "--rate", "1", "--price", "-1"), "price must be above 0"),
        (("--cost", "COST", "--rate", "1", "--find-replicas", "fast"), "find_replicas must be like"),
        (("--cost", "COST", "--sweep", "1,2", "--find-replicas", "ttft_p50<9"), "takes no --sweep"),
        (("--cost", "COST", "--rate", "1", "--plot", "p.png"), "needs --sweep or --find-replicas"),
    ],
)
def test_mistakes_are_said_in_one_line(
    words: tuple[str, ...], said: str, cost_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status: object = main(["simulate", *(cost_file if word == "COST" else word for word in words)])
    except SystemExit as exit_:
        status = exit_.code
    error = capsys.readouterr().err
    assert status == 2
    assert said in error
    assert error.count("\n") == 1
