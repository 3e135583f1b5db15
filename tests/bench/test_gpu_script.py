"""The script that measures a GPU keeps earlier figures, and says of each target whether it is met."""

from __future__ import annotations

from rich.console import Console

from benchmarks import gpu


def target(name: str) -> gpu.Target:
    [found] = [target for target in gpu.targets() if target.name == name]
    return found


def test_new_figures_join_those_of_earlier_calls() -> None:
    old = {"offline_tok_s": {"qwen3-0.6b": 1.0, "qwen3-8b": 2.0}, "date": "yesterday"}
    new = {"offline_tok_s": {"qwen3-8b": 3.0}, "date": "today", "parity": {"holds": True}}
    assert gpu.merged(old, new) == {
        "offline_tok_s": {"qwen3-0.6b": 1.0, "qwen3-8b": 3.0},
        "date": "today",
        "parity": {"holds": True},
    }
    assert old["offline_tok_s"] == {"qwen3-0.6b": 1.0, "qwen3-8b": 2.0}


def test_a_target_is_met_missed_or_not_measured() -> None:
    throughput = target("offline qwen3-0.6b, tok/s")
    assert throughput.met({"offline_tok_s": {"qwen3-0.6b": 20_500.0}}) is True
    assert throughput.met({"offline_tok_s": {"qwen3-0.6b": 20_499.0}}) is False
    assert throughput.met({"offline_tok_s": {"qwen3-8b": 9_000.0}}) is None
    idle = target("device idle, offline qwen3-8b")
    assert idle.met({"device_idle_share": {"qwen3-8b": 0.029}}) is True
    assert idle.met({"device_idle_share": {"qwen3-8b": None}}) is None


def test_ratios_need_both_figures() -> None:
    host = target("host at 256 over 16 requests")
    assert host.met({"host_us_per_step": {"16": 100.0, "256": 149.0}}) is True
    assert host.met({"host_us_per_step": {"16": 100.0, "256": 151.0}}) is False
    assert host.met({"host_us_per_step": {"256": 151.0}}) is None


def test_parity_that_left_something_out_is_no_parity() -> None:
    parity = target("parity holds, nothing left out")
    assert parity.met({"parity": {"holds": True, "complete": True}}) is True
    assert parity.met({"parity": {"holds": True, "complete": False}}) is False


def test_every_target_has_a_line_in_the_table() -> None:
    console = Console(width=120, record=True)
    figures = {"card": "a card", "date": "2026-11-28", "deterministic_equal": False}
    console.print(gpu.target_table(figures, gpu.targets()))
    text = console.export_text()
    assert "a card, 2026-11-28" in text
    assert text.count("MISSED") == 1
    for target in gpu.targets():
        assert target.name in text


def test_a_figure_of_an_earlier_call_shows_its_day() -> None:
    parity, throughput = target("parity holds, nothing left out"), target("offline qwen3-0.6b, tok/s")
    figures = {
        "date": "2026-11-29",
        "measured": {"parity": "2026-11-27", "offline_tok_s": "2026-11-29", "deterministic_tok_s": "2026-11-28"},
        "parity": {"holds": True, "complete": True},
    }
    assert gpu.day_of(parity, figures) == "2026-11-27"
    assert gpu.day_of(throughput, figures) == "2026-11-29"
    assert gpu.day_of(target("deterministic qwen3-8b, of normal speed"), figures) == "2026-11-28"
    assert gpu.day_of(target("host at 256 over 16 requests"), figures) == ""
