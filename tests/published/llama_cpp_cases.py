"""Reads llama.cpp's `tests/test-chat.cpp` into values: what a model writes, and the message that must come of it.

The file is a program, so a small interpreter runs it: declarations, blocks, loops over templates, and the chains
`tst.test(output).tools({…}).expect(…).run()`, each run of which is a `Case`. Whatever else the program does (it
applies templates, it builds grammars) is passed over, and `unread` names each chain that was passed over with it. This
module knows nothing of mini_sglang: it says what the file says.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, fields
from pathlib import PurePosixPath
from typing import Any

# --- what comes out ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tool:
    name: str
    description: str
    parameters: dict[str, Any]  # a JSON schema


@dataclass(frozen=True)
class Call:
    name: str
    arguments: str  # JSON text; its beginning in a partial case
    id: str = ""


@dataclass
class Message:
    """A message of a chat, in the fields of llama.cpp's `common_chat_msg`."""

    role: str = ""
    content: str = ""
    content_parts: list[tuple[str, str]] = field(default_factory=list)  # (type, text)
    tool_calls: list[Call] = field(default_factory=list)
    reasoning_content: str = ""
    tool_name: str = ""
    tool_call_id: str = ""


@dataclass
class Case:
    """A chat, what the model writes next (`input`), and the message that must be read from it (`expect`).

    llama.cpp compares content and thoughts without the white space at both ends, and arguments as JSON; arguments that
    are not whole are not compared. With `reasoning_format` "none" thoughts stay in the content, markers and all, as do
    those that the prompt opened. With a continuation (`continue_final_message`) the last of `messages` is the beginning
    of the answer, and `expect` has it too.
    """

    template: str  # the file's name without `.jinja`
    line: int  # of `test(` in the file
    input: str
    tools: list[Tool] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    expect: Message = field(default_factory=Message)
    enable_thinking: bool = True
    reasoning_format: str = "none"
    parallel_tool_calls: bool = False
    tool_choice: str = "auto"
    json_schema: str = ""
    is_partial: bool = False
    add_generation_prompt: bool = True
    continue_final_message: str = "none"
    expect_reconstruction: bool = False


@dataclass
class Reading:
    cases: list[Case]
    unread: list[str]  # one line for each chain without a run: where it stands, and why


def read_cases(source: str) -> Reading:
    """All cases of `source`, the text of test-chat.cpp, in the order in which the program runs them."""
    return _Program(source).read()


# --- tokens --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Token:
    kind: str  # "string" | "number" | "name" | "mark"
    value: str  # of a string: its value
    line: int


_TOKEN = re.compile(
    r"""(?P<space>\s+ | //[^\n]* | /\*.*?\*/ | \#[^\n]*(?<=\n)?)
      | R"(?P<fence>[^(\s]*)\((?P<raw>.*?)\)(?P=fence)"
      | "(?P<string>(?:[^"\\]|\\.)*)"
      | '(?P<char>(?:[^'\\]|\\.)+)'
      | (?P<number>\d[\w.]*)
      | (?P<name>[A-Za-z_]\w*(?:::\w+)*)
      | (?P<mark>->|<<|>>|[=!<>]=|&&|\|\||.)""",
    re.X | re.S,
)
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]+)|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([0-7]{1,3})|(.))", re.S)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a"}


def _unescape(text: str) -> str:
    def one(match: re.Match[str]) -> bytes:
        byte, short, long, octal, plain = match.groups()
        if byte or octal:
            return bytes([int(byte, 16) if byte else int(octal, 8)])
        if short or long:
            return chr(int(short or long, 16)).encode()
        return _ESCAPED.get(plain, plain).encode()

    pieces, end = b"", 0
    for match in _ESCAPE.finditer(text):
        pieces += text[end : match.start()].encode() + one(match)
        end = match.end()
    return (pieces + text[end:].encode()).decode()


def _tokens(source: str) -> list[_Token]:
    found: list[_Token] = []
    line = 1
    for match in _TOKEN.finditer(source):
        kind = match.lastgroup
        if kind in ("raw", "fence") or match["raw"] is not None:
            token = _Token("string", match["raw"], line)
        elif kind in ("string", "char"):
            token = _Token("string", _unescape(match[kind]), line)
        elif kind != "space":
            assert kind is not None
            token = _Token(kind, match[kind], line)
        line += match[0].count("\n")
        if kind != "space":
            found.append(token)
    return found


# --- the interpreter -----------------------------------------------------------------------------------------------


class _Unknown(Exception):
    """A statement that is none of the kinds that are read."""


@dataclass(frozen=True)
class _Tester:
    template: str


_Scope = dict[str, Any]
_DECLARED = {"auto", "common_chat_msg", "common_chat_tool", "std::string", "char", "std::vector"}
_ENUMS = ("COMMON_REASONING_FORMAT_", "COMMON_CHAT_TOOL_CHOICE_", "COMMON_CHAT_CONTINUATION_")
_FUNCTIONS = ("test_lfm2_parser", "test_template_output_peg_parsers")


class _Program:
    """The tokens of the file, and the cases that have been run so far."""

    def __init__(self, source: str) -> None:
        self._tokens = [*_tokens(source), _Token("mark", "", 0)]
        self._cases: list[Case] = []
        self._run_at: set[int] = set()  # tokens at which chains began that were run
        self._why: dict[int, str] = {}  # of chains in statements that could not be read
        self._functions: dict[str, int] = {}

    def read(self) -> Reading:
        scope: _Scope = dict(_HELPERS)
        self._declare_globals(scope)
        self._call("test_template_output_peg_parsers", [False], scope)
        chains = [i for i in range(len(self._tokens)) if self._is_chain(i)]
        unread = [
            f"line {self._tokens[i].line}: {self._why.get(i, 'never reached')}" for i in chains if i not in self._run_at
        ]
        return Reading(self._cases, unread)

    def _is_chain(self, at: int) -> bool:
        """Whether `name.test(` stands at `at`."""
        values = [token.value for token in self._tokens[at : at + 4]]
        return self._tokens[at].kind == "name" and values[1:] == [".", "test", "("]

    # Statements.

    def _declare_globals(self, scope: _Scope) -> None:
        """Run the declarations outside functions, and note where the functions of the cases begin."""
        at = 0
        while at < len(self._tokens) - 1:
            token = self._tokens[at]
            if token.value in ("static", "const") and (declared := self._declaration(at, scope)):
                at = declared
                continue
            if token.value in _FUNCTIONS and self._tokens[at + 1].value == "(":
                self._functions.setdefault(token.value, at)
            at = self._closing(at) + 1 if token.value in ("{", "(") else at + 1

    def _call(self, name: str, arguments: list[Any], scope: _Scope) -> None:
        """Run a function of the file whose parameters have no defaults."""
        at = self._functions[name] + 1
        end = self._closing(at)
        given = iter(arguments)
        inner = dict(scope)
        for i in range(at, end + 1):  # a parameter's name stands before each comma and before the bracket
            if self._tokens[i].value in (",", ")"):
                inner[self._tokens[i - 1].value] = next(given)
        self._block(end + 1, inner)

    def _block(self, at: int, scope: _Scope) -> int:
        """Run `{ … }` that begins at `at`. Returns where the next statement begins."""
        end = self._closing(at)
        at += 1
        while at < end:
            try:
                at = self._statement(at, scope)
            except _Unknown as why:
                after = self._after_statement(at)
                self._why.update({i: str(why) for i in range(at, after) if self._is_chain(i)})
                at = after
        return end + 1

    def _statement(self, at: int, scope: _Scope) -> int:
        value = self._tokens[at].value
        if value == ";":
            return at + 1
        if value == "{":
            return self._block(at, dict(scope))
        if value == "for":
            return self._loop(at, scope)
        if declared := self._declaration(at, scope):
            return declared
        if assigned := self._assignment(at, scope):
            return assigned
        if value in self._functions:
            arguments, end = self._list(at + 1, ")", scope)
            self._call(value, arguments, scope)
        elif self._is_chain(at):
            result, end = self._expression(at, scope)
            if result is not None:
                raise _Unknown("a chain that is not run")
            self._run_at.add(at)
        else:
            raise _Unknown(f"a statement that begins with {value!r}")
        return self._expect(end, ";")

    def _loop(self, at: int, scope: _Scope) -> int:
        """`for (type name : values) { … }`"""
        head_end = self._closing(at + 1)
        colon = next((i for i in range(at, head_end) if self._tokens[i].value == ":"), None)
        if colon is None:
            raise _Unknown("a loop that is not over values")
        values, _ = self._expression(colon + 1, scope)
        for value in values:
            self._block(head_end + 1, {**scope, self._tokens[colon - 1].value: value})
        return self._closing(head_end + 1) + 1

    def _declaration(self, at: int, scope: _Scope) -> int | None:
        """`type name = value;`, `type name{values};` or `type name;`. None if something else stands there."""
        while self._tokens[at].value in ("static", "const"):
            at += 1
        kind = self._tokens[at].value
        if kind not in _DECLARED:
            return None
        at += 1
        if self._tokens[at].value == "<":  # std::vector<…>
            at = next(i for i in range(at, len(self._tokens)) if self._tokens[i].value == ">") + 1
        while self._tokens[at].value in ("*", "&", "const"):
            at += 1
        name, mark = self._tokens[at], self._tokens[at + 1].value
        if name.kind != "name" or mark not in ("=", "{", ";"):
            return None
        value: Any = []
        end = at + 1
        if mark != ";":
            value, end = self._expression(at + 2 if mark == "=" else at + 1, scope)
        if kind == "common_chat_tool":
            value = _tool(value)
        elif kind == "common_chat_msg":
            value = deepcopy(_message(value))
        scope[name.value] = value
        return self._expect(end, ";")

    def _assignment(self, at: int, scope: _Scope) -> int | None:
        """`name.field = value;` for a message."""
        name, dot, attribute, mark = self._tokens[at : at + 4]
        if (dot.value, mark.value) != (".", "=") or not isinstance(scope.get(name.value), Message):
            return None
        value, end = self._expression(at + 4, scope)
        if attribute.value not in {known.name for known in fields(Message)}:
            raise _Unknown(f"a message has no {attribute.value}")
        setattr(scope[name.value], attribute.value, value)
        return self._expect(end, ";")

    # Expressions: each returns its value and where the next token stands.

    def _expression(self, at: int, scope: _Scope) -> tuple[Any, int]:
        """A sum of strings, or one value."""
        value, at = self._operand(at, scope)
        while self._tokens[at].value == "+" and self._tokens[at].kind == "mark":
            other, at = self._operand(at + 1, scope)
            value = _string(value) + _string(other)
        return value, at

    def _operand(self, at: int, scope: _Scope) -> tuple[Any, int]:
        token = self._tokens[at]
        if token.kind == "string":
            text = ""
            while self._tokens[at].kind == "string":
                text += self._tokens[at].value
                at += 1
            return text, at
        if token.value == "{":
            return self._list(at, "}", scope)
        if token.kind == "name":
            return self._name(at, scope)
        raise _Unknown(f"an expression that begins with {token.value!r}")

    def _name(self, at: int, scope: _Scope) -> tuple[Any, int]:
        token = self._tokens[at]
        if token.value in ("true", "false"):
            return token.value == "true", at + 1
        for enum in _ENUMS:
            if token.value.startswith(enum):
                return token.value.removeprefix(enum).lower(), at + 1
        if token.value not in scope:
            raise _Unknown(f"{token.value} is not known")
        value, at = scope[token.value], at + 1
        if self._tokens[at].value == "(":
            arguments, at = self._list(at, ")", scope)
            value = value(*arguments)
        elif self._is_chain(at - 1):
            return self._chain(at - 1, value, scope)
        return value, at

    def _chain(self, at: int, tester: _Tester, scope: _Scope) -> tuple[None, int]:
        """`tester.test(output).setter(value)….run()`: adds a case."""
        (text,), end = self._list(at + 3, ")", scope)
        case = Case(tester.template, self._tokens[at].line, _string(text))
        while self._tokens[end].value == ".":
            setter = self._tokens[end + 1].value
            arguments, end = self._list(end + 2, ")", scope)
            if setter == "run":
                case.messages = case.messages or [deepcopy(scope["message_user"])]
                case.expect.role = case.expect.role or "assistant"
                self._cases.append(case)
                return None, end
            if setter not in _SETTERS:
                raise _Unknown(f"nothing is known of .{setter}()")
            _SETTERS[setter](case, *arguments)
        raise _Unknown("a chain that is not run")

    def _list(self, at: int, close: str, scope: _Scope) -> tuple[list[Any], int]:
        """Values between the bracket at `at` and `close`."""
        values, at = [], at + 1
        while self._tokens[at].value != close or self._tokens[at].kind != "mark":
            value, at = self._expression(at, scope)
            values.append(value)
            if self._tokens[at].value == ",":
                at += 1
            elif self._tokens[at].value != close:
                raise _Unknown(f"{self._tokens[at].value!r} in a list")
        return values, at + 1

    # Places.

    def _expect(self, at: int, mark: str) -> int:
        if self._tokens[at].value != mark:
            raise _Unknown(f"{self._tokens[at].value!r} where {mark!r} was expected")
        return at + 1

    def _closing(self, at: int) -> int:
        """Where the bracket that opens at `at` is closed."""
        depth = 0
        for i in range(at, len(self._tokens)):
            if self._tokens[i].kind == "mark":
                depth += self._tokens[i].value in ("(", "{", "[")
                depth -= self._tokens[i].value in (")", "}", "]")
                if depth == 0:
                    return i
        raise ValueError(f"line {self._tokens[at].line}: a bracket is never closed")

    def _after_statement(self, at: int) -> int:
        """Where the statement that is passed over ends: after `;`, or after the block of an `if` and the like."""
        while self._tokens[at].kind != "mark" or self._tokens[at].value != ";":
            if self._tokens[at].kind == "mark" and self._tokens[at].value in ("(", "{", "["):
                block = self._tokens[at].value == "{"
                at = self._closing(at)
                if block and self._tokens[at + 1].value not in (";", "(", ")", "else", "catch", ","):
                    return at + 1
            at += 1
        return at + 1


# --- values --------------------------------------------------------------------------------------------------------


def _string(value: Any) -> str:
    """`{}` is an empty string where one is wanted."""
    if value == []:
        return ""
    if not isinstance(value, str):
        raise _Unknown(f"{value!r} is no string")
    return value


def _tool(value: Any) -> Tool:
    if isinstance(value, Tool):
        return value
    name, description, parameters = value
    return Tool(name, description, json.loads(parameters))


def _call(value: Any) -> Call:
    return value if isinstance(value, Call) else Call(*map(_string, value))


def _message(value: Any) -> Message:
    """A message, or the list of its fields in order."""
    if isinstance(value, Message):
        return value
    given: dict[str, Any] = dict(zip((known.name for known in fields(Message)), value, strict=False))
    given |= {name: _string(text) for name, text in given.items() if name not in ("content_parts", "tool_calls")}
    given["content_parts"] = [tuple(part) for part in given.get("content_parts", ())]
    given["tool_calls"] = [_call(call) for call in given.get("tool_calls", ())]
    return Message(**given)


def _answer(content: str, reasoning: str = "", name: str = "", arguments: str = "", id: str = "") -> Message:
    calls = [Call(name, arguments, id)] if name or id else []
    return Message("assistant", content, tool_calls=calls, reasoning_content=reasoning)


def _answer_with_calls(reasoning: str, content: str, calls: list[list[str]]) -> Message:
    return Message(
        "assistant", content, tool_calls=[Call(*map(_string, call)) for call in calls], reasoning_content=reasoning
    )


# The functions of the file that its cases call, by what their signatures say.
_HELPERS: Mapping[str, Callable[..., Any]] = {
    "peg_tester": lambda path, debug=False: _Tester(PurePosixPath(path).stem),
    "std::string": lambda text: text,
    "simple_assist_msg": _answer,
    "message_with_tool_calls": lambda name, arguments: _answer("", "", name, arguments),
    "message_with_tool_calls_and_reasoning": lambda name, arguments, why: _answer("", why, name, arguments),
    "message_with_reasoning_content_and_multiple_tool_calls": _answer_with_calls,
    "message_with_content_and_tool_call": lambda content, name, arguments: _answer(content, "", name, arguments),
    "message_with_reasoning_and_tool_call": lambda why, name, arguments: _answer("", why, name, arguments),
}


def _sets(name: str) -> Callable[..., None]:
    return lambda case, value=True: setattr(case, name, value)


def _expects(name: str) -> Callable[..., None]:
    return lambda case, value: setattr(case.expect, name, _string(value))


def _set_tools(case: Case, tools: list[Any]) -> None:
    case.tools = [_tool(tool) for tool in tools]


def _set_messages(case: Case, messages: list[Any]) -> None:
    case.messages = [deepcopy(_message(message)) for message in messages]


def _set_expect(case: Case, message: Any) -> None:
    case.expect = deepcopy(_message(message))


def _set_calls(case: Case, calls: list[Any]) -> None:
    case.expect.tool_calls = [_call(call) for call in calls]


_SETTERS: Mapping[str, Callable[..., None]] = {
    **{
        name: _sets(name)
        for name in (
            "enable_thinking",
            "reasoning_format",
            "parallel_tool_calls",
            "tool_choice",
            "json_schema",
            "is_partial",
            "add_generation_prompt",
            "continue_final_message",
            "expect_reconstruction",
        )
    },
    "tools": _set_tools,
    "messages": _set_messages,
    "expect": _set_expect,
    "expect_content": _expects("content"),
    "expect_reasoning": _expects("reasoning_content"),
    "expect_tool_calls": _set_calls,
}


def by_template(cases: list[Case]) -> Iterator[tuple[str, list[Case]]]:
    """The cases of each template, by its name."""
    for name in sorted({case.template for case in cases}):
        yield name, [case for case in cases if case.template == name]
