"""`make bench` puts tables into the document, each in its place, and knows what it cannot measure."""

from __future__ import annotations

import pytest

from benchmarks import cpu


def test_a_table_takes_the_place_of_the_one_before() -> None:
    document = "before\n<!-- begin a -->\nold\n<!-- end a -->\nafter\n"
    new = cpu.put(document, "a", "new")
    assert new == "before\n<!-- begin a -->\nnew\n<!-- end a -->\nafter\n"
    assert cpu.put(new, "a", "new") == new


def test_a_document_without_the_place_is_refused() -> None:
    with pytest.raises(ValueError, match="has no place for b"):
        cpu.put("<!-- begin a -->\n<!-- end a -->", "b", "text")


def test_a_table_is_markdown() -> None:
    assert cpu.table([["a", "b"], ["1", "2"]]) == "| a | b |\n|---|---|\n| 1 | 2 |"


def test_every_benchmark_has_its_place_and_its_script() -> None:
    document = cpu.DOCUMENT.read_text()
    for benchmark in cpu.benchmarks("llama-server", "vllm"):
        assert f"<!-- begin {benchmark.name} -->\n" in document
        assert (cpu.ROOT / "benchmarks" / benchmark.words[0]).exists()


def test_figures_become_rows_with_medians_of_both_sides_and_of_the_ratios() -> None:
    rates = {"ours": [2.0, 9.0, 4.0], "transformers": [1.0, 3.0, 4.0]}
    figures = {"formats": {"float32": {"one stream": rates, "overhead_ms": 0.1}}}
    assert cpu.transformers_rows(figures)[1:] == [["float32", "one stream", "4.0", "3.0", "2.00"]]
    sides = {"ours": [1.0], "peer": [2.0]}
    assert cpu.peer_rows({"peer": "that one 1.0", "workloads": {"w": {"tok/s": sides}}})[1:] == [
        ["w", "tok/s", "1.0", "2.0", "0.50"]
    ]


def test_a_benchmark_names_the_packages_it_misses() -> None:
    benchmark = cpu.Benchmark("x", ("x.py",), cpu.peer_rows, ("json", "no_such_package"))
    assert benchmark.missing == ["no_such_package"]
