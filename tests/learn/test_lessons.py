"""Every lesson of the course keeps what the course promises, on the engine as it is now.

A run of a lesson's checks, or of its demo, has a process of its own, forked from one that has imported what is slow to
import (`warm_process`). `pytest tests/learn/test_lessons.py -k L2` runs what belongs to one lesson.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from xml.etree import ElementTree

import pytest

from mini_sglang.learn import quotes
from mini_sglang.learn.blanking import marker
from mini_sglang.learn.lesson import MIN_PITFALLS, PACKAGE, Lesson, Pitfall, all_lessons, module_source
from mini_sglang.learn.results import CheckResult, Report
from mini_sglang.learn.running import run_checks
from mini_sglang.learn.workspace import blanked_sources
from tests.learn import warm_process

LESSONS = all_lessons()
PITFALLS = [
    pytest.param(lesson, pitfall, id=f"{lesson.id}-{pitfall.name}") for lesson in LESSONS for pitfall in lesson.pitfalls
]
BUSY_S = 300  # a busy machine is no reason to fail
FIGURE_TAG = "{http://www.w3.org/2000/svg}svg"

every_lesson = pytest.mark.parametrize("lesson", LESSONS, ids=lambda lesson: lesson.id)


def told(report: Report) -> str:
    """What to print when a report is not the one that was hoped for."""
    lines = [f"{result.name}: {result.failure}" for result in report.results if result.failure]
    return "\n".join([*lines, report.cut_short, report.unfinished])


def first_failure(report: Report) -> CheckResult:
    failed = report.first_failure
    assert failed is not None, f"all {len(report.results)} checks pass\n{told(report)}"
    return failed


def run(lesson: Lesson, sources: Mapping[str, str], *, contract: bool = False) -> Report:
    """The checks with `sources` in place: all of them and the contract, or those up to the first that fails."""
    return run_checks(
        lesson, sources, contract=contract, stop_at_first=not contract, limit_s=BUSY_S, python=warm_process.run
    )


@every_lesson
def test_the_engines_own_code_passes_with_the_contract(lesson: Lesson) -> None:
    sources = {exercise.module: module_source(exercise.module) for exercise in lesson.exercises}
    report = run(lesson, sources, contract=True)
    assert report.passed, told(report)
    assert report.results[-1].name == "greedy tokens equal those of transformers"


@pytest.mark.parametrize(("lesson", "pitfall"), PITFALLS)
def test_a_pitfall_is_caught_and_named(lesson: Lesson, pitfall: Pitfall) -> None:
    failed = first_failure(run(lesson, {pitfall.module: pitfall.apply(module_source(pitfall.module))}))
    assert pitfall.name in failed.guards, f"caught by another check: {failed}"
    assert len(failed.guards) <= 2, failed.guards


@every_lesson
def test_a_fresh_workspace_fails_and_names_a_function_to_write(lesson: Lesson) -> None:
    failure = first_failure(run(lesson, blanked_sources(lesson))).failure
    assert failure is not None
    assert failure.kind == "NotImplementedError", failure
    assert failure.message in [marker(lesson.id, function) for function in lesson.functions]


@every_lesson
def test_the_demo_runs(lesson: Lesson) -> None:
    command = [PACKAGE.name, "learn", "play", lesson.id]
    status, output, errors = warm_process.run_apart(command, PACKAGE.parent, os.environ, BUSY_S)
    assert status == 0, errors
    assert output.strip()


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
