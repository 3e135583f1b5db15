"""Bounds what a chat template may cost: a template comes with a model, and is a program.

jinja2's sandbox, in which transformers renders, keeps templates from Python. It bounds neither loops nor texts. Here
loops, calls and texts of a compiled template are counted, and one that goes beyond the bounds raises TemplateError.
Knows no messages and no tokenizer.
"""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Callable
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer
from transformers.utils.chat_template_utils import _compile_jinja_template

MOST_ROUNDS = 1_000_000  # of all loops and macros of one rendering
MOST_SECONDS = 5.0  # of this thread's time
MOST_CHARACTERS = 1 << 26  # written or joined in one rendering
MOST_BITS = 4096  # of a number
MOST_WIDTH = 1 << 16  # that text may be padded or indented to
_QUEUEING = ("append", "pop")  # what templates such as Kimi K2's do with lists that they made

_spent = threading.local()


def count_anew() -> None:
    """Forget what templates of this thread have spent, before the next one is rendered."""
    _spent.rounds = _spent.characters = 0
    _spent.given = None
    _spent.end = time.thread_time() + MOST_SECONDS


def bounded_source(source: str) -> str:
    """Compile a template so that it keeps to the bounds; returns the source under which transformers renders it.

    That source is a comment: compiling the template itself would compute its constants, however large. It holds the
    template's text, in which transformers looks for names. Raises TemplateError for a template that does not compile.
    """
    stub = "{# " + source.replace("#}", "") + " #}"
    template = _compile_jinja_template(stub)
    if not isinstance(template.environment, _BoundedEnvironment):
        environment = _bounded(template.environment)
        parsed = _Bounding().visit(environment.parse(source))
        parsed.set_environment(environment)
        code = environment.compile(parsed)
        template.__dict__.update(jinja2.Template.from_code(environment, code, environment.globals).__dict__)
    return stub


def _bounded(environment: Any) -> jinja2.Environment:
    """The environment of transformers, with the same filters and functions, within the bounds."""
    bounded: Any = environment.overlay()
    bounded.__class__ = _BoundedEnvironment
    kept = {name: value for name, value in environment.globals.items() if name != "lipsum"}  # endless text
    bounded.globals = {**kept, "_round": _round, "_join": _join}
    bounded.filters = {**environment.filters, **{name: _foreseen(name, environment.filters[name]) for name in _WIDE}}
    bounded.finalize = _counted
    bounded.binop_table = {**environment.binop_table, **_OPERATORS}
    return bounded  # type: ignore[no-any-return]


class _Bounding(NodeTransformer):
    """Counts the rounds of loops, macros and blocks, and joins of texts by `~`."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        return self._with_round(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        return self._with_round(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        return self._with_round(node)

    def _with_round(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        tick = nodes.ExprStmt(_call("_round", [], node.lineno)).set_lineno(node.lineno)
        node.body.insert(0, tick)
        return node  # type: ignore[no-any-return]

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _call("_join", node.nodes, node.lineno)


def _call(name: str, arguments: list[nodes.Expr], lineno: int) -> nodes.Call:
    function = nodes.Name(name, "load", lineno=lineno)
    return nodes.Call(function, arguments, [], None, None, lineno=lineno)


class _BoundedEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox whose operators go through `call_binop`, and whose methods of texts are not given huge widths."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Safe are these methods of a list too, if it is the template's own: `call` sees to that."""
        return (type(obj) is list and attr in _QUEUEING) or super().is_safe_attribute(obj, attr, value)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # names as in jinja2
        method = getattr(__obj, "__wrapped__", __obj)  # the sandbox wraps str.format
        owner = getattr(method, "__self__", None)
        if type(owner) is list and method.__name__ in _QUEUEING and _is_given(owner, __context):
            raise SecurityError(f"{method.__name__} of a list that the template was given is unsafe")
        if not isinstance(owner, str):
            return super().call(__context, __obj, *args, **kwargs)
        _foresee(method.__name__, owner, args, kwargs)
        return _counted(super().call(__context, __obj, *args, **kwargs))


def _is_given(wanted: list[Any], context: Any) -> bool:
    """Whether the list is in what the template was given, at any depth."""
    given: set[int] | None = getattr(_spent, "given", None)  # identities, of one rendering
    if given is None:
        given = _spent.given = set()
        left = [*context.parent.values()]
        while left:
            value = left.pop()
            if isinstance(value, (list, tuple, dict)) and id(value) not in given:
                given.add(id(value))
                left.extend(value.values() if isinstance(value, dict) else value)
    return id(wanted) in given


def _round() -> None:
    _spent.rounds = getattr(_spent, "rounds", 0) + 1
    if time.thread_time() > getattr(_spent, "end", math.inf):
        raise jinja2.TemplateError(f"the template computes for more than {MOST_SECONDS} seconds")
    if _spent.rounds > MOST_ROUNDS:
        raise jinja2.TemplateError(f"the template takes more than {MOST_ROUNDS} rounds of its loops")


def _count(characters: int) -> None:
    _spent.characters = getattr(_spent, "characters", 0) + characters
    if _spent.characters > MOST_CHARACTERS:
        raise jinja2.TemplateError(f"the template writes more than {MOST_CHARACTERS} characters")


def _counted(value: Any) -> Any:
    """`value`, whose text is about to be written. A list may hold the same list many times over."""
    if isinstance(value, str):
        _count(len(value))
    elif isinstance(value, (list, tuple, dict)):
        _round()
        _count(len(value))
        for item in value.items() if isinstance(value, dict) else value:
            _counted(item)
    return value


def _join(*parts: Any) -> str:
    return "".join(str(_counted(part)) for part in parts)


def _add(left: Any, right: Any) -> Any:
    for side in (left, right):
        if isinstance(side, (str, list, tuple)):
            _count(len(side))
    return _small(left + right)


def _multiply(left: Any, right: Any) -> Any:
    for text, times in ((left, right), (right, left)):
        if isinstance(text, (str, list, tuple)) and isinstance(times, int):
            _count(len(text) * max(times, 0))
    return _small(left * right)


def _power(base: Any, exponent: Any) -> Any:
    if isinstance(base, int) and isinstance(exponent, int) and base.bit_length() * abs(exponent) > MOST_BITS:
        raise jinja2.TemplateError(f"the template makes a number of more than {MOST_BITS} bits")
    return base**exponent


def _modulo(left: Any, right: Any) -> Any:
    if isinstance(left, str):
        _foresee("format", left, right if isinstance(right, tuple) else (right,), {})
        _counted(right)
    return left % right


def _small(value: Any) -> Any:
    if isinstance(value, int) and value.bit_length() > MOST_BITS:
        raise jinja2.TemplateError(f"the template makes a number of more than {MOST_BITS} bits")
    return value


def _foresee(name: str, text: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse or count what a method or filter `name` of `text` would make of these arguments."""
    given = (*args, *kwargs.values())
    if any(isinstance(value, int) and abs(value) > MOST_WIDTH for value in given):
        raise jinja2.TemplateError(f"the template pads text to more than {MOST_WIDTH} characters")
    if name in ("format", "format_map") and _WIDE_FIELD.search(text):
        raise jinja2.TemplateError("the template formats a number or text to a huge width")
    if name == "replace" and len(given) > 1 and all(isinstance(value, str) for value in given[:2]):
        _count(text.count(given[0]) * len(given[1]))
    if name in ("join", "format"):
        _counted(list(given))
    if name == "join" and given and isinstance(given[0], (list, tuple)):
        _count(len(text) * len(given[0]))
    if name == "expandtabs":
        _count(text.count("\t") * max((value for value in given if isinstance(value, int)), default=8))


_WIDE_FIELD = re.compile(r"\d{6}|%[-+ #0]*\*")
_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "+": _add,
    "*": _multiply,
    "**": _power,
    "%": _modulo,
}
_WIDE = ("center", "format", "indent", "join", "replace", "tojson", "wordwrap")


def _foreseen(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The same filter within the bounds."""
    first = 1 if hasattr(function, "jinja_pass_arg") else 0  # some are given the context or the environment before

    def bounded(*args: Any, **kwargs: Any) -> Any:
        value, rest = args[first], args[first + 1 :]
        if name == "join":
            value = list(value)
            _foresee(name, str(rest[0]) if rest else "", (value,), {})
            args = (*args[:first], value, *rest)
        elif isinstance(value, str):
            _foresee(name, value, rest, kwargs)
        else:
            _foresee("", "", rest, kwargs)
            _counted(value)
        return _counted(function(*args, **kwargs))

    if first:
        bounded.jinja_pass_arg = function.jinja_pass_arg  # type: ignore[attr-defined]
    return bounded
