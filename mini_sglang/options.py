"""Command-line options made from the fields of a configuration, and the configuration made from what was given.

Names, defaults and help live with the fields. Knows argparse and dataclasses, and no command.
"""

from __future__ import annotations

import argparse
import dataclasses
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from mini_sglang.config import EngineConfig

FAILED = 1
USER_ERROR = 2


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the usage text in front of it."""

    def error(self, message: str) -> NoReturn:
        self.exit(USER_ERROR, f"{self.prog}: error: {message}\n")


Commands: typing.TypeAlias = "argparse._SubParsersAction[Parser]"  # what `add_subparsers` returns
Run = Callable[[argparse.Namespace], int]  # what a command does; returns the exit status


def add_command(commands: Commands, name: str, help: str, run: Run) -> Parser:
    """A command whose options are still to be added."""
    parser = commands.add_parser(name, help=help, description=_sentence(help))
    parser.set_defaults(command=run)
    return parser


def add_group(commands: Commands, name: str, help: str) -> Commands:
    """A command that has commands itself."""
    parser = commands.add_parser(name, help=help, description=_sentence(help))
    return parser.add_subparsers(metavar="WHAT", required=True)


def _sentence(help: str) -> str:
    return f"{help[0].upper()}{help[1:]}."


def add_fields(
    parser: argparse.ArgumentParser,
    config_class: type[Any],
    title: str,
    *,
    only: set[str] | None = None,
    leave_out: set[str] | None = None,
    defaults: Mapping[str, object] | None = None,
) -> None:
    """One option for each field of the dataclass; only those given, or named in `defaults`, end up in the namespace.

    Fields have their `help` as metadata, and `bare` if the option may stand without a value: it means that value then.
    """
    group = parser.add_argument_group(title)
    hints = typing.get_type_hints(config_class)
    for field in dataclasses.fields(config_class):
        if field.name in (leave_out or ()) or (only is not None and field.name not in only):
            continue
        default = (defaults or {}).get(field.name, field.default)
        help = field.metadata["help"] + ("" if default in (None, ()) else f" (default: {default})")
        if field.name == "model":
            group.add_argument("model_argument", metavar="MODEL", nargs="?", default=argparse.SUPPRESS, help=help)
            help = "the same as MODEL"
        group.add_argument(
            f"--{field.name.replace('_', '-')}",
            default=(defaults or {}).get(field.name, argparse.SUPPRESS),
            help=help.replace("%", "%%"),
            **_value_arguments(hints[field.name]),
            **({"nargs": "?", "const": field.metadata["bare"]} if "bare" in field.metadata else {}),
        )
        if field.name == "run_ahead":
            group.add_argument(
                "--no-overlap", dest="run_ahead", action="store_const", const=0, default=argparse.SUPPRESS,
                help="the same as --run-ahead 0",
            )  # fmt: skip


def _value_arguments(hint: Any) -> dict[str, Any]:
    """What argparse needs to know to read a value of this type.

    It is a Literal, bool, int, float or str, or such or None, or a tuple of strings.
    """
    if isinstance(hint, types.UnionType):
        [hint] = [choice for choice in typing.get_args(hint) if choice is not type(None)]
    if typing.get_origin(hint) is typing.Literal:
        return {"choices": typing.get_args(hint)}
    if typing.get_origin(hint) is tuple:
        return {"action": "append", "metavar": "TEXT"}
    if hint is bool:
        return {"action": argparse.BooleanOptionalAction}
    return {"type": hint, "metavar": {int: "N", float: "X"}.get(hint, "TEXT")}


def from_options(config_class: type[Any], options: argparse.Namespace) -> Any:
    """The dataclass, from what was given: fields that are absent from the options, or None, keep their default."""
    given = {field.name: getattr(options, field.name, None) for field in dataclasses.fields(config_class)}
    return config_class(
        **{
            name: tuple(value) if isinstance(value, list) else value
            for name, value in given.items()
            if value is not None
        }
    )


def engine_config(options: argparse.Namespace) -> EngineConfig:
    if hasattr(options, "model_argument"):
        if hasattr(options, "model"):
            raise ValueError(f"model was given twice: {options.model_argument} and --model {options.model}")
        options.model = options.model_argument
    config: EngineConfig = from_options(EngineConfig, options)
    return config
