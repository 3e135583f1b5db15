"""`mini-sglang bench prefix`: hits of the real scheduler beside the optimum, and the cost, on small traces."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mini_sglang.bench.optimal_cache import belady_hits, number_beginnings, unlimited_hits
from mini_sglang.bench.prefix import count_hits, measure_cost, measure_prefix
from mini_sglang.bench.traces import TraceRow
from mini_sglang.cli import main

BLOCK = 32
CHATS = [[0, 1], [0, 2, 3], [0, 1, 4, 5], [0, 2, 3, 6], [0, 1, 4, 5, 7], [0, 1, 4, 5, 7]]


def rows(prompts: list[list[int]], missing: int = 0) -> list[TraceRow]:
    """Requests of these blocks, the last of each `missing` some tokens."""
    return [TraceRow(i, len(ids) * BLOCK - missing, 1, tuple(ids), BLOCK) for i, ids in enumerate(prompts)]


def write_trace(path: Path, prompts: list[list[int]]) -> str:
    """In Mooncake's format, whose blocks have 512 tokens."""
    lines = [
        {"timestamp": 1000 * i, "input_length": 512 * len(ids) - 100, "output_length": 5, "hash_ids": ids}
        for i, ids in enumerate(prompts)
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    return str(path)


def test_a_large_pool_finds_all_that_was_there_before_whole_prompts_included() -> None:
    assert unlimited_hits(number_beginnings(CHATS)) == 0 + 1 + 2 + 3 + 4 + 5
    assert count_hits(rows(CHATS), [8, 100]) == [15, 15]
    assert count_hits(rows(CHATS, missing=BLOCK - 1), [8]) == [15]  # last blocks of one token


def test_a_small_pool_forgets_what_was_used_longest_ago() -> None:
    trace = [[0], [1], [2], [0], [2]]
    assert count_hits(rows(trace), [3, 2]) == [2, 1]  # in the small one 1 and 2 displaced 0
    assert belady_hits(trace, 2) == 2


def test_of_a_prompt_the_end_is_forgotten_first() -> None:
    assert count_hits(rows([[0, 1, 2], [3], [0, 1, 2]]), [3]) == [2]


@settings(max_examples=50, deadline=None)
@given(
    prompts=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), min_size=1, max_size=20),
    pool=st.integers(4, 20),
)
def test_the_cache_never_beats_the_optimum_and_reaches_it_in_a_large_pool(prompts: list[list[int]], pool: int) -> None:
    beginnings = number_beginnings(prompts)
    distinct = max(map(max, beginnings)) + 1
    large = max(distinct, 4) + 1  # the last block of a prompt that is all there is computed in a page of its own
    found, found_in_large = count_hits(rows(prompts), [pool, large])
    assert found <= belady_hits(beginnings, pool)
    assert found_in_large == unlimited_hits(beginnings)


def test_cost_counts_what_was_evicted_once_the_pool_was_full() -> None:
    trace = rows([[number] for number in range(10)])
    cost = measure_cost(trace, cached_tokens=4 * BLOCK, page_size=8)
    assert cost.prompt_tokens == 5 * BLOCK  # the fifth filled the pool and was the first to evict
    assert cost.evicted_pages == 5 * BLOCK // 8
    assert min(cost.match_us, cost.insert_us, cost.evict_us or 0) > 0


def test_cost_is_of_all_prompts_if_nothing_was_evicted() -> None:
    cost = measure_cost(rows(CHATS), cached_tokens=100 * BLOCK, page_size=16)
    assert (cost.prompt_tokens, cost.evicted_pages, cost.evict_us) == (sum(map(len, CHATS)) * BLOCK, 0, None)


def test_a_pool_that_cannot_hold_the_longest_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match=r"0\.5 of 8 distinct blocks is a pool of 4, but the longest prompt has 5"):
        measure_prefix(rows(CHATS), shares=[1, 0.5], page_size=16)
    with pytest.raises(ValueError, match="cached_tokens must be at least 160, the longest prompt, got 100"):
        measure_prefix(rows(CHATS), shares=[1], cached_tokens=100, page_size=16)


def test_the_command_prints_tables_and_writes_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, out = write_trace(tmp_path / "trace.jsonl", CHATS), tmp_path / "figures.json"
    pools = ["--share", "1", "--share", "0.75", "--cached-tokens", "3072"]
    assert main(["bench", "prefix", trace, *pools, "--json", str(out)]) == 0
    text = capsys.readouterr().out
    assert "Belady" in text
    assert "evict one page" in text
    figures = json.loads(out.read_text())
    assert (figures["blocks"], figures["distinct"], figures["unlimited"]) == (23, 8, 15)
    assert [hits["pool_blocks"] for hits in figures["hits"]] == [8, 6]
    assert figures["hits"][0]["rate"] == figures["unlimited_rate"] == 15 / 23
    assert figures["cost"]["evicted_pages"] > 0


def test_the_command_reads_only_the_first_requests(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = write_trace(tmp_path / "trace.jsonl", CHATS)
    assert main(["bench", "prefix", trace, "--requests", "2", "--share", "1"]) == 0
    assert "2 prompts of 5 blocks" in capsys.readouterr().out


def test_a_trace_without_prefixes_has_nothing_to_find(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "azure.csv"
    trace.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,374,44\n2023-11-16 18:15:50.99,9,1\n"
    )
    assert main(["bench", "prefix", str(trace), "--share", "1"]) == 0
    assert "without a limit 0.00%" in " ".join(capsys.readouterr().out.split())


def test_a_plot_without_matplotlib_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    trace = write_trace(tmp_path / "trace.jsonl", CHATS)
    assert main(["bench", "prefix", trace, "--plot", str(tmp_path / "plot.svg")]) == 2
    assert "--plot needs matplotlib" in capsys.readouterr().err


@pytest.mark.parametrize("share", ["inf", "nan", "0", "-1"])
def test_a_share_that_is_no_share_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], share: str) -> None:
    trace = write_trace(tmp_path / "trace.jsonl", CHATS)
    with pytest.raises(SystemExit, match="2"):
        main(["bench", "prefix", trace, f"--share={share}"])
    assert f"argument --share: must be a finite number above 0, got {share}" in capsys.readouterr().err


def test_the_plot_is_an_image(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    trace, plot = write_trace(tmp_path / "trace.jsonl", CHATS), tmp_path / "plot.png"
    assert main(["bench", "prefix", trace, "--share", "1", "--share", "0.75", "--plot", str(plot)]) == 0
    assert plot.read_bytes().startswith(b"\x89PNG")
