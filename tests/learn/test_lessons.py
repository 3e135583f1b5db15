"""Every lesson of the course keeps what the course promises, on the engine as it is now.

One process per run of a lesson's checks or demo, as many at a time as there are cores:
`pytest tests/learn/test_lessons.py -k L2` runs what belongs to one lesson.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar
from xml.etree import ElementTree

import pytest

from mini_sglang.learn import quotes
from mini_sglang.learn.blanking import marker
from mini_sglang.learn.lesson import MIN_PITFALLS, Lesson, all_lessons, module_source
from mini_sglang.learn.results import CheckResult, Report
from mini_sglang.learn.running import run_checks
from mini_sglang.learn.workspace import blanked_sources

LESSONS = all_lessons()
PITFALLS = {f"{lesson.id}-{pitfall.name}": (lesson, pitfall) for lesson in LESSONS for pitfall in lesson.pitfalls}
# before there are threads: CPython 3.11 counts the depth of all that is parsed at the same time together (gh-106905)
BLANKED = {lesson.id: blanked_sources(lesson) for lesson in LESSONS}
BUSY_S = 300  # a busy machine is no reason to fail
FIGURE_TAG = "{http://www.w3.org/2000/svg}svg"

Test = TypeVar("Test", bound=Callable[..., None])

every_lesson = pytest.mark.parametrize("lesson", LESSONS, ids=lambda lesson: lesson.id)


def told(report: Report) -> str:
    """What to print when a report is not the one that was hoped for."""
    lines = [f"{result.name}: {result.failure}" for result in report.results if result.failure]
    return "\n".join([*lines, report.cut_short, report.unfinished])


def first_failure(report: Report) -> CheckResult:
    failed = report.first_failure
    assert failed is not None, f"all {len(report.results)} checks pass\n{told(report)}"
    return failed


def looks_at(run: Callable[..., object]) -> Callable[[Test], Test]:
    """A test whose `outcome` is what `run` returns, called with the test's parameters in a pool of all such runs."""

    def mark(test: Test) -> Test:
        test.run = run  # type: ignore[attr-defined]
        return test

    return mark


@pytest.fixture(scope="session")
def outcomes(request: pytest.FixtureRequest) -> Iterator[dict[str, Future[object]]]:
    """By name, what the selected tests look at, in their order."""
    items = [item for item in request.session.items if isinstance(item, pytest.Function)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        yield {
            item.name: pool.submit(item.function.run, **item.callspec.params)
            for item in items
            if hasattr(item.function, "run")
        }
        pool.shutdown(cancel_futures=True)


@pytest.fixture
def outcome(request: pytest.FixtureRequest, outcomes: dict[str, Future[object]]) -> Any:
    return outcomes[request.node.name].result()


def solution(lesson: Lesson) -> Report:
    sources = {exercise.module: module_source(exercise.module) for exercise in lesson.exercises}
    return run_checks(lesson, sources, limit_s=BUSY_S)


@every_lesson
@looks_at(solution)
def test_the_engines_own_code_passes_with_the_contract(lesson: Lesson, outcome: Report) -> None:
    assert outcome.passed, told(outcome)
    assert outcome.results[-1].name == "greedy tokens equal those of transformers"


def with_pitfall(name: str) -> Report:
    lesson, pitfall = PITFALLS[name]
    sources = {pitfall.module: pitfall.apply(module_source(pitfall.module))}
    return run_checks(lesson, sources, contract=False, stop_at_first=True, limit_s=BUSY_S)


@pytest.mark.parametrize("name", PITFALLS)
@looks_at(with_pitfall)
def test_a_pitfall_is_caught_and_named(name: str, outcome: Report) -> None:
    _, pitfall = PITFALLS[name]
    failed = first_failure(outcome)
    assert pitfall.name in failed.guards, f"caught by another check: {failed}"
    assert len(failed.guards) <= 2, failed.guards


def fresh(lesson: Lesson) -> Report:
    return run_checks(lesson, BLANKED[lesson.id], contract=False, stop_at_first=True, limit_s=BUSY_S)


@every_lesson
@looks_at(fresh)
def test_a_fresh_workspace_fails_and_names_a_function_to_write(lesson: Lesson, outcome: Report) -> None:
    failure = first_failure(outcome).failure
    assert failure is not None
    assert failure.kind == "NotImplementedError", failure
    assert failure.message in [marker(lesson.id, function) for function in lesson.functions]


def demo(lesson: Lesson) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mini_sglang", "learn", "play", lesson.id]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=BUSY_S, check=False, stdin=subprocess.DEVNULL
    )


@every_lesson
@looks_at(demo)
def test_the_demo_runs(lesson: Lesson, outcome: subprocess.CompletedProcess[str]) -> None:
    assert outcome.returncode == 0, outcome.stderr
    assert outcome.stdout.strip()


@every_lesson
def test_a_lesson_has_its_pitfalls_and_tells_of_each(lesson: Lesson) -> None:
    assert len(lesson.pitfalls) >= MIN_PITFALLS
    headings = [line for line in (lesson.folder / "lesson.md").read_text().splitlines() if line.startswith("### ")]
    missing = [pitfall.name for pitfall in lesson.pitfalls if f"### {pitfall.name}: {pitfall.title}" not in headings]
    assert not missing, f"lesson.md lacks the headings of {missing}; it has {headings}"


@every_lesson
def test_there_is_help_with_every_function(lesson: Lesson) -> None:
    assert [hint.function for hint in lesson.hints] == lesson.functions


@every_lesson
def test_every_quote_of_a_page_resolves(lesson: Lesson) -> None:
    page = (lesson.folder / "lesson.md").read_text()
    assert "--8<--" in page
    assert "--8<--" not in quotes.expand(page)


@every_lesson
def test_a_figure_is_well_formed_and_fetches_nothing(lesson: Lesson) -> None:
    text = (lesson.folder / "figure.svg").read_text()
    assert ElementTree.fromstring(text).tag == FIGURE_TAG
    assert "figure.svg" in (lesson.folder / "lesson.md").read_text()
    assert text.count("http") == text.count("http://www.w3.org/")
