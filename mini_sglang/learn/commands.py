"""`mini-sglang learn list | start | check | hint | solution | play`: each a function that returns an exit status.

A command that cannot be carried out raises ValueError or OSError, which is shown in one line; a wrong implementation is
a report. How lessons are read, run and checked is the other modules' business.
"""

from __future__ import annotations

import difflib
import runpy
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console
from rich.syntax import Syntax
from rich.table import Table

from mini_sglang.learn import workspace
from mini_sglang.learn.lesson import LEVELS, Lesson, all_lessons, find_lesson, module_path, module_source
from mini_sglang.learn.report import print_report
from mini_sglang.learn.running import run_checks
from mini_sglang.learn.workspace import Progress
from mini_sglang.weights.hub import resolve_model


def list_lessons(course: Path) -> int:
    """Show all lessons, and how far each is in the folder `course`."""
    progress = workspace.load_progress(course)
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("", "lesson", "the question", "you"):
        table.add_column(column, style="bold" if not column else "")
    for lesson in all_lessons():
        table.add_row(lesson.id, lesson.title, lesson.question, _status(progress.get(lesson.id, Progress())))
    console = Console(highlight=False)
    console.print(table)
    console.print("\n[bold]mini-sglang learn start L0[/] begins with the first.")
    return 0


def _status(progress: Progress) -> str:
    if progress.passed:
        return "[green]done[/]"
    if progress.checks:
        return f"{progress.checks_passed} of {progress.checks} checks"
    return "begun" if progress.started else ""


def start(name: str, folder: Path | None) -> int:
    """Write a lesson's workspace, and say what to do in it."""
    lesson, folder = _lesson_and_folder(name, folder)
    files = workspace.start(lesson, folder)
    progress = _progress(lesson, folder)
    progress.started = True
    workspace.save_progress(folder.parent, lesson, progress)
    console = Console(highlight=False)
    console.print(f"[bold]{lesson.id} · {lesson.title}[/]\n{lesson.question}\n")
    for path in files:
        console.print(f"  {path}", soft_wrap=True)
    console.print(f"\nRead lesson.md, write {', '.join(lesson.functions)}, then")
    console.print(f"[bold]mini-sglang learn check {workspace.lesson_arguments(lesson, folder)}[/]", soft_wrap=True)
    return 0


def check(name: str, folder: Path | None) -> int:
    """Run the checks and the contract on the workspace; returns 0 if all of it holds."""
    if find_spec("pytest") is None:
        raise ValueError("the checks need pytest: pip install 'mini-sglang[learn]'")
    lesson, folder = _lesson_and_folder(name, folder)
    sources = workspace.read_sources(lesson, folder)
    blanks = workspace.still_blank(lesson, sources)
    resolve_model("smollm2-135m")  # so that fetching it does not count as the checks' time
    console = Console(highlight=False)
    yours = ", ".join(module_path(module).name for module in sources)
    with console.status(f"running the engine with your {yours}"):
        report = run_checks(lesson, sources)
    print_report(console, lesson, report, blanks, folder)
    progress = _progress(lesson, folder)
    passed = report.passed and not blanks
    progress.started, progress.passed = True, progress.passed or passed
    progress.checks = len(report.results)
    progress.checks_passed = sum(result.failure is None for result in report.results)
    workspace.save_progress(folder.parent, lesson, progress)
    return 0 if passed else 1


def hint(name: str, function: str | None, level: int | None, folder: Path | None) -> int:
    """Show one level of help: the next one that was not shown yet, unless `level` is given."""
    lesson, folder = _lesson_and_folder(name, folder)
    progress = _progress(lesson, folder)
    chosen = _hinted(lesson, function, folder)
    level = level if level is not None else min(progress.hints.get(chosen, 0) + 1, LEVELS)
    found = next((hint for hint in lesson.hints if hint.function == chosen), None)
    if found is None:
        raise ValueError(f"lesson {lesson.id} has no hint for {chosen}")
    console = Console(highlight=False)
    console.print(f"[bold]{chosen}[/]  hint {level} of {LEVELS}\n")
    console.print(found.levels[level - 1].strip(), markup=False, highlight=False)
    if level < LEVELS:
        console.print("\n[dim]the same command again says more[/]")
    progress.hints[chosen] = max(level, progress.hints.get(chosen, 0))
    workspace.save_progress(folder.parent, lesson, progress)
    return 0


def _hinted(lesson: Lesson, function: str | None, folder: Path) -> str:
    """The function meant by its full name or its last part; without one, the first that is still to be written."""
    if function is not None:
        found = [name for name in lesson.functions if function in (name, name.split(".")[-1])]
        if len(found) != 1:
            raise ValueError(f"{function!r} is not one of the functions to write: {', '.join(lesson.functions)}")
        return found[0]
    try:
        blanks = workspace.still_blank(lesson, workspace.read_sources(lesson, folder))
    except (FileNotFoundError, ValueError):
        blanks = []
    return (blanks or lesson.functions)[0]


def solution(name: str, folder: Path | None) -> int:
    """Show how the workspace differs from the engine's own modules, as a diff."""
    lesson, folder = _lesson_and_folder(name, folder)
    sources = workspace.read_sources(lesson, folder)
    console = Console(highlight=False)
    for module, source in sources.items():
        path = (folder / module_path(module)).as_posix()
        lines = difflib.unified_diff(
            source.splitlines(), module_source(module).splitlines(), path, f"{path} (the engine's)", lineterm=""
        )
        diff = "\n".join(lines)
        if not diff:
            console.print(f"{path} is the engine's own code.", soft_wrap=True)
        elif console.is_terminal:
            console.print(Syntax(diff, "diff", theme="ansi_dark", background_color="default", word_wrap=True))
        else:
            print(diff)
    return 0


def play(name: str) -> int:
    """Run the lesson's demo."""
    lesson = find_lesson(name)
    runpy.run_path(str(lesson.folder / "play.py"))["main"]()
    return 0


def _lesson_and_folder(name: str, folder: Path | None) -> tuple[Lesson, Path]:
    lesson = find_lesson(name)
    return lesson, folder or workspace.default_folder(lesson)


def _progress(lesson: Lesson, folder: Path) -> Progress:
    return workspace.load_progress(folder.parent).get(lesson.id, Progress())


COMMANDS: Mapping[str, Callable[..., int]] = {
    "list": list_lessons, "start": start, "check": check, "hint": hint, "solution": solution, "play": play,
}  # fmt: skip
