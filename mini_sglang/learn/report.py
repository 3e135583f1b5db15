"""Tells a learner what a run has found: every check on a line, then the first failure in the lesson's own terms.

Prints only; paths are those of the workspace.
"""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.text import Text

from mini_sglang.learn.blanking import marker
from mini_sglang.learn.lesson import Lesson
from mini_sglang.learn.results import CheckResult, Failure, Report

_LONGEST = 400  # characters of a value
_OUTPUT_LINES = 12


def print_report(console: Console, lesson: Lesson, report: Report, blanks: list[str], folder: Path) -> None:
    passed = sum(result.failure is None for result in report.results)
    console.print(f"[bold]{lesson.id} · {escape(lesson.title)}[/]   {passed} of {len(report.results)} checks pass\n")
    for result in report.results:
        mark = "[green]✓[/]" if result.failure is None else "[red]✗[/]"
        console.print(f"  {mark} {escape(result.name)}")
    console.print()
    if report.cut_short:
        during = f", while it was checked that\n[bold]{escape(report.unfinished)}[/]" if report.unfinished else ""
        console.print(f"[red]Not all was checked:[/] {escape(report.cut_short)}{during}\n")
    if (first := report.first_failure) is not None and first.failure is not None:
        _print_failure(console, lesson, first, first.failure, folder)
    if blanks:
        console.print(f"Still to write: {', '.join(blanks)}    ([bold]mini-sglang learn hint {lesson.id}[/])")
    elif report.passed:
        console.print(f"[green]All of it holds, and the contract with it[/] ({report.seconds:.0f} s).")
        console.print(f"[bold]mini-sglang learn solution {lesson.id}[/] shows how the engine says it.")


def _print_failure(console: Console, lesson: Lesson, result: CheckResult, failure: Failure, folder: Path) -> None:
    console.print(Text(result.name.capitalize(), style="bold red"))
    if failure.kind == "NotImplementedError" and failure.message.startswith(marker(lesson.id, "")):
        console.print(f"  needs a function that is not written yet: [bold]{failure.message.split()[-1]}[/]\n")
        return
    if failure.what:
        _print_field(console, "what", failure.what)
        _print_field(console, "expected", failure.expected)
        _print_field(console, "got", failure.got)
    else:
        _print_field(console, "expected", "no error")
        _print_field(console, "got", f"{failure.kind}: {failure.message}" if failure.message else failure.kind)
    if failure.invariant:
        _print_field(console, "broken", failure.invariant)
    if failure.read:
        _print_field(console, "read", failure.read)
    for frame in failure.frames[-1:]:
        _print_field(console, "where", f"{folder / frame.path}, line {frame.line}, in {frame.function}")
    if failure.output:
        _print_field(console, "printed", "\n".join(failure.output.splitlines()[-_OUTPUT_LINES:]))
    console.print()
    for name in result.guards:
        if (pitfall := lesson.pitfall(name)) is not None:
            console.print(f"  This is what “{escape(pitfall.title)}” looks like ({lesson.id}, pitfall {name}).")
    if result.guards:
        console.print()


def _print_field(console: Console, label: str, value: str) -> None:
    shown = value if len(value) <= _LONGEST else f"{value[: _LONGEST // 2]} … {value[-_LONGEST // 2 :]}"
    text = Text.assemble((f"{label:<10}", "dim"), shown.replace("\n", "\n" + " " * 10))
    console.print(Padding(text, (0, 0, 0, 2)))
