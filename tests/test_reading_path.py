"""A person can read the engine in a weekend: the path of docs/reading.md leads through it, and stays short."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from mini_sglang.learn.lesson import all_lessons

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "reading.md"
MOST_LINES = 5000
ROW = re.compile(
    r"^\| \[(?P<name>[^\]]+)\]\(\.\./(?P<path>[^)]+)\) \| (?P<lines>\d+) "
    r"\| (?P<question>[^|]*) \| (?P<lessons>[^|]*)\|$"
)
PATH = [found.groupdict() for line in PAGE.read_text(encoding="utf-8").splitlines() if (found := ROW.match(line))]
CORE = ("scheduling/", "execution/", "attention/", "models/", "layers/")  # folders that the path must not go around
ASIDE = {  # of these, what the page leaves for later: other ways to do what a stop of the path does
    *("scheduling/simulation.py", "scheduling/__init__.py", "execution/__init__.py", "attention/__init__.py"),
    *("models/__init__.py", "layers/__init__.py", "layers/qk_norm.py"),
    *("scheduling/speculation.py", "scheduling/stats.py", "execution/drafts.py", "execution/measured_cost.py"),
    *("execution/drafting.py", "execution/load_drafter.py", "models/eagle3.py"),
    *("execution/graph_runner.py", "execution/cuda_graph.py", "execution/prefill_graph.py", "execution/pinned_ring.py"),
    *("execution/worker_group.py", "execution/worker_main.py", "execution/node.py"),
    *("attention/triton_backend.py", "attention/alternating.py"),
    *("attention/flashinfer_backend.py", "attention/flash_attn_backend.py"),
}


def code_lines(path: Path) -> int:
    """Lines that are neither blank nor a comment nor part of a docstring."""
    source = path.read_text(encoding="utf-8")
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and (
            ast.get_docstring(node, clean=False) is not None
        ):
            docstrings.update(range(node.body[0].lineno, (node.body[0].end_lineno or node.body[0].lineno) + 1))
    lines = enumerate(source.splitlines(), 1)
    return sum(bool(line.strip()) and not line.lstrip().startswith("#") and at not in docstrings for at, line in lines)


def test_the_path_is_a_weekend() -> None:
    assert sum(code_lines(ROOT / stop["path"]) for stop in PATH) <= MOST_LINES


@pytest.mark.parametrize("stop", PATH, ids=lambda stop: stop["name"])
def test_a_stop_says_how_long_it_is_and_what_it_answers(stop: dict[str, str]) -> None:
    lines = code_lines(ROOT / stop["path"])
    assert stop["path"] == f"mini_sglang/{stop['name']}"
    assert abs(int(stop["lines"]) - lines) <= max(10, lines // 10), f"docs/reading.md: {stop['name']} has {lines} lines"
    assert stop["question"].strip().endswith("?")


def test_no_part_of_the_core_is_left_out() -> None:
    package = ROOT / "mini_sglang"
    core = {str(path.relative_to(package)) for folder in CORE for path in (package / folder).glob("*.py")}
    assert core - {stop["name"] for stop in PATH} == ASIDE


def test_named_lessons_exist() -> None:
    named = {lesson.strip() for stop in PATH for lesson in stop["lessons"].split(",") if lesson.strip()}
    assert named <= {lesson.id for lesson in all_lessons()}


def test_the_bound_can_be_broken(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(
        '"""A module.\n\nOf two lines.\n"""\n\n# a comment\nx = 1\n\n\ndef f():\n    """It."""\n'
    )
    assert code_lines(tmp_path / "a.py") == 2
