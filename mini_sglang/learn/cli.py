"""The options of `mini-sglang learn list | start | check | hint | solution | play`.

What each does is in commands.py, which is imported when one runs.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from mini_sglang.learn.workspace import COURSE
from mini_sglang.options import Commands, Parser, Run, add_command, add_group


def add_learn(commands: Commands) -> None:
    actions = add_group(commands, "learn", "the course: write parts of the engine yourself, and run it with them")

    command = add_command(actions, "list", "all lessons, and how far you are", _list)
    help = f"the folder of the workspaces (default: {COURSE})"
    command.add_argument("course", metavar="DIR", nargs="?", type=Path, default=COURSE, help=help)

    _add_folder(_add(actions, "start", "write a workspace", _start))
    _add_folder(_add(actions, "check", "run the engine with your code", _check))

    command = _add(actions, "hint", "help, more each time", _hint)
    command.add_argument("function", metavar="FUNCTION", nargs="?", help="default: the first that is not written yet")
    command.add_argument("--level", type=int, choices=(1, 2, 3), help="1 asks, 3 all but tells")
    _add_folder(command, "--folder")

    _add_folder(_add(actions, "solution", "the engine's own code, as a diff", _solution))
    _add(actions, "play", "watch the lesson's subject move", _play)


def _add(actions: Commands, name: str, help: str, run: Run) -> Parser:
    """A command about one lesson."""
    command = add_command(actions, name, help, run)
    command.add_argument("lesson", metavar="LESSON", help="such as L2")
    return command


def _add_folder(command: Parser, name: str = "folder") -> None:
    help = f"the workspace (default: {COURSE}/LESSON)"
    nargs = None if name.startswith("-") else "?"
    command.add_argument(name, metavar="DIR", type=Path, nargs=nargs, help=help)


def _list(options: argparse.Namespace) -> int:
    from mini_sglang.learn import commands

    return commands.list_lessons(options.course)


def _start(options: argparse.Namespace) -> int:
    from mini_sglang.learn import commands

    return commands.start(options.lesson, options.folder)


def _check(options: argparse.Namespace) -> int:
    from mini_sglang.learn import commands

    return commands.check(options.lesson, options.folder)


def _hint(options: argparse.Namespace) -> int:
    from mini_sglang.learn import commands

    return commands.hint(options.lesson, options.function, options.level, options.folder)


def _solution(options: argparse.Namespace) -> int:
    from mini_sglang.learn import commands

    return commands.solution(options.lesson, options.folder)


def _play(options: argparse.Namespace) -> int:
    from mini_sglang.learn import commands

    return commands.play(options.lesson)
