"""Shows a learner what a run has found: every check on a line, then the first failure in the lesson's own terms.

It only prints; paths are those of the workspace.
"""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from mini_sglang.learn.blanking import marker
from mini_sglang.learn.lesson import Lesson
from mini_sglang.learn.results import CheckResult, Failure, Report
from mini_sglang.learn.running import CHECK
from mini_sglang.learn.workspace import lesson_arguments

_LONGEST = 400  # characters of a value
_OUTPUT_LINES = 12


def print_report(console: Console, lesson: Lesson, report: Report, blanks: list[str], folder: Path) -> None:
    """Show the results, the first failure, and what to do next."""
    passed = sum(result.failure is None for result in report.results)
    count = f"{passed} of {len(report.results)} checks pass"
    if report.unfinished:
        count += ", and one did not end"
    console.print(f"[bold]{lesson.id} · {escape(lesson.title)}[/]   {count}\n")
    for result in report.results:
        mark = "[green]✓[/]" if result.failure is None else "[red]✗[/]"
        console.print(f"  {mark} {escape(result.name)}")
    if report.unfinished:
        console.print(f"  [red]…[/] {escape(report.unfinished)}")
    if report.first_failure is not None:
        console.print("  [dim]· the contract, when all of these hold[/]")
    console.print()
    if report.cut_short:
        console.print(f"[red]Not all was checked:[/] {escape(report.cut_short)}\n")
    if (first := report.first_failure) is not None and first.failure is not None:
        _print_failure(console, lesson, first, first.failure, folder)
    if blanks:
        command = f"mini-sglang learn hint {lesson_arguments(lesson, folder, '--folder ')}"
        console.print(f"Still to write: {', '.join(blanks)}    ([bold]{escape(command)}[/])")
    elif report.passed:
        console.print(f"[green]All of it holds, and the contract with it[/] ({report.seconds:.0f} s).")
        command = f"mini-sglang learn solution {lesson_arguments(lesson, folder)}"
        console.print(f"[bold]{escape(command)}[/] shows how the engine says it.")


def _print_failure(console: Console, lesson: Lesson, result: CheckResult, failure: Failure, folder: Path) -> None:
    console.print(Text(result.name.capitalize(), style="bold red"))
    if failure.kind == "NotImplementedError" and failure.message.startswith(marker(lesson.id, "")):
        console.print(f"  needs a function that is not written yet: [bold]{failure.message.split()[-1]}[/]\n")
        return
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    for label, value in _fields(lesson, failure, folder).items():
        if value:
            table.add_row(label, Text(_shortened(value)))
    console.print(Padding(table, (0, 0, 1, 2), expand=False))
    for name in result.guards:
        if (pitfall := lesson.pitfall(name)) is not None:
            console.print(f"  A common cause: [bold]{escape(pitfall.title)}[/] ({lesson.id}, pitfall {name}).")
    if result.guards:
        console.print()


def _fields(lesson: Lesson, failure: Failure, folder: Path) -> dict[str, str]:
    """What to show of a failure, by label; an unexpected exception is shown as what the check got."""
    unexpected = f"{failure.kind}: {failure.message}" if failure.message else failure.kind
    yours = [frame for frame in failure.frames if frame.path != CHECK]
    checks = [frame for frame in failure.frames if frame.path == CHECK]
    return {
        "what": failure.what,
        "expected": failure.expected or "no error",
        "got": failure.got or unexpected,
        "broken": failure.invariant,
        "where": f"{folder / yours[-1].path}, line {yours[-1].line}, in {yours[-1].function}" if yours else "",
        "check": f"{lesson.folder / CHECK}, line {checks[0].line}" if checks else "",
        "read": f"{failure.read}  ({folder / 'lesson.md'})" if failure.read else "",
        "printed": "\n".join(failure.output.splitlines()[-_OUTPUT_LINES:]),
    }


def _shortened(value: str) -> str:
    return value if len(value) <= _LONGEST else f"{value[: _LONGEST // 2]} … {value[-_LONGEST // 2 :]}"
