"""The options of `mini-sglang learn list | start | check | hint | solution | play`.

What each does is in commands.py, which is imported when one runs.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from mini_sglang.learn.workspace import COURSE
from mini_sglang.options import Commands, Parser, add_command, add_group


def add_learn(commands: Commands) -> None:
    actions = add_group(commands, "learn", "the course: write parts of the engine yourself, and run it with them")

    command = _add(actions, "list", "all lessons, and how far you are", "course")
    help = f"the folder of the workspaces (default: {COURSE})"
    command.add_argument("course", metavar="DIR", nargs="?", type=Path, default=COURSE, help=help)

    _add_folder(_add_for_lesson(actions, "start", "write a workspace", "folder"))
    _add_folder(_add_for_lesson(actions, "check", "run the engine with your code", "folder"))

    command = _add_for_lesson(actions, "hint", "help, more each time", "function", "level", "folder")
    command.add_argument("function", metavar="FUNCTION", nargs="?", help="default: the first that is not written yet")
    command.add_argument("--level", type=int, choices=(1, 2, 3), help="1 asks, 3 all but tells")
    _add_folder(command, "--folder")

    _add_folder(_add_for_lesson(actions, "solution", "the engine's own code, as a diff", "folder"))
    _add_for_lesson(actions, "play", "watch the lesson's subject move")


def _add(actions: Commands, name: str, help: str, *arguments: str) -> Parser:
    """A command that calls the function of its name in commands.py with these options."""

    def run(options: argparse.Namespace) -> int:
        from mini_sglang.learn.commands import COMMANDS

        return COMMANDS[name](*(getattr(options, argument) for argument in arguments))

    return add_command(actions, name, help, run)


def _add_for_lesson(actions: Commands, name: str, help: str, *arguments: str) -> Parser:
    command = _add(actions, name, help, "lesson", *arguments)
    command.add_argument("lesson", metavar="LESSON", help="such as L2")
    return command


def _add_folder(command: Parser, name: str = "folder") -> None:
    help = f"the workspace (default: {COURSE}/LESSON)"
    nargs = None if name.startswith("-") else "?"
    command.add_argument(name, metavar="DIR", type=Path, nargs=nargs, help=help)
