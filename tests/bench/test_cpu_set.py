"""`make bench` measures what has a table in the document, and knows what it cannot measure."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import cpu, tables


def test_every_benchmark_has_its_script_and_its_table() -> None:
    sources = {source for block in tables.BLOCKS for source in block.sources}
    for benchmark in cpu.benchmarks("llama-server", "vllm"):
        assert benchmark.results.name in sources
        assert (cpu.ROOT / "benchmarks" / f"{benchmark.words[0]}.py").exists()


def test_a_run_leaves_its_figures_with_machine_versions_day_and_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "benchmarks" / "measure.py"
    script.parent.mkdir()
    script.write_text("import sys, json\njson.dump(sys.argv[1:3], open(sys.argv[4], 'w'))\n")
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    cpu.Benchmark("x", ("measure", "--peer", "/some/where/peer")).run()
    run = json.loads((tmp_path / "cpu-x.json").read_text())
    assert run["figures"] == ["--peer", "/some/where/peer"]
    assert run["command"] == "python -m benchmarks.measure --peer peer"
    assert "cores" in run["machine"]
    assert set(run["versions"]) == {"torch", "transformers"}
    assert tables.provenance(run, None).endswith("`python -m benchmarks.measure --peer peer`.")


def test_a_benchmark_names_the_packages_it_misses() -> None:
    benchmark = cpu.Benchmark("x", ("x.py",), ("json", "no_such_package"))
    assert benchmark.missing == ["no_such_package"]
