"""Figures become tables: medians, shares of the floor, percentiles in pairs; each goes to its place in the document."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import tables


def test_a_table_takes_the_place_of_the_one_before() -> None:
    document = "before\n<!-- begin a -->\nold\n<!-- end a -->\nafter\n"
    new = tables.put(document, "a", "new")
    assert new == "before\n<!-- begin a -->\nnew\n<!-- end a -->\nafter\n"
    assert tables.put(new, "a", "new") == new


def test_a_document_without_the_place_is_refused() -> None:
    with pytest.raises(ValueError, match="has no place for b"):
        tables.put("<!-- begin a -->\n<!-- end a -->", "b", "text")


def test_a_table_is_markdown() -> None:
    assert tables.markdown([["a", "b"], ["1", "2"]]) == "| a | b |\n|---|---|\n| 1 | 2 |"


def test_a_block_opens_with_machine_versions_day_and_command() -> None:
    figures = {"machine": "a machine", "versions": {"torch": "2", "triton": "3"}, "date": "2026-11-29"}
    assert tables.provenance(figures, None) == "a machine; torch 2, triton 3; 2026-11-29."
    assert tables.provenance(figures, "python a.py") == "a machine; torch 2, triton 3; 2026-11-29, `python a.py`."


def test_both_sides_are_shown_by_their_medians_and_the_median_of_their_ratios() -> None:
    rates = {"ours": [2.0, 9.0, 4.0], "transformers": [1.0, 3.0, 4.0]}
    run = {"figures": {"formats": {"float32": {"one stream": rates, "overhead_ms": 0.1}}}}
    assert tables.transformers_rows(run)[1:] == [["float32", "one stream", "4.0", "3.0", "2.00"]]


def test_both_percentiles_of_a_latency_share_a_row() -> None:
    sides = {"tok/s": {"ours": [1.0], "peer": [2.0]}}
    sides |= {"TTFT p50, ms": {"ours": [3.0], "peer": [2.0]}, "TTFT p99, ms": {"ours": [9.0], "peer": [3.0]}}
    assert tables.peer_rows({"figures": {"peer": "that one 1.0", "workloads": {"w": sides}}}) == [
        ["Workload", "", "mini_sglang", "that one 1.0", "ratio"],
        ["w", "tok/s", "1.0", "2.0", "0.50"],
        ["w", "TTFT p50 / p99, ms", "3.0 / 9.0", "2.0 / 3.0", "1.50 / 3.00"],
    ]


def test_an_engine_without_a_figure_gets_a_dash() -> None:
    both: dict[str, Any] = {"qwen3-0.6b": 1234, "qwen3-8b": 99.5}
    shares = {"qwen3-0.6b": 0.5, "qwen3-8b": 0.75}
    rates = {"offline_tok_s": both, "single_tok_s": both, "offline_of_floor": shares, "single_of_floor": shares}
    one = {**rates, "first_token_ms": both, "start_s": both}
    other = {key: {"qwen3-8b": value["qwen3-8b"]} for key, value in one.items()}
    rows = tables.gpu_rows({"engines": {"one": one, "other": other}, "server_start_s": {"one": "16 to 18"}})
    assert rows[0] == ["", "one", "other"]
    assert rows[1][1:] == ["1,234 (50%)", "–"]
    assert rows[2][1:] == ["99.5 (75%)", "99.5 (75%)"]
    assert rows[-1][1:] == ["16 to 18", "–"]


def test_the_share_of_two_gpus_is_of_the_floor_of_the_same_workload() -> None:
    own = {
        "offline": {"offline_tok_s": 50.0, "offline_of_floor": 0.5},
        "single": {"single_tok_s": 8.0, "single_of_floor": 0.8},
    }
    peers = {"engines": {"this": {"offline_tok_s": 60, "single_tok_s": 9.0, "start_s": 23}}}
    assert [row[1] for row in tables.tp_rows(peers, own)[1:]] == ["60 (60%)", "9.0 (90%)", "23"]
