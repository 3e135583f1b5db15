"""How families of models write tool calls and thoughts, as data: a new family is an entry here, and its cases.

A notation is spelled as the model writes it, with slots in braces. The prompt of a model whose template knows no tools,
the grammar of forced calls (grammar/calls.py), the reader of answers (server/answers/reader.py) and the table in
docs/api.md are all made from the same entry. Knows no tokenizer and no schema.

Facts about notations come from the models' chat templates, and from the cases in llama.cpp's tests/test-chat.cpp.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import regex

from mini_sglang.text.json_types import type_of

Json = dict[str, Any]
# What stands for the arguments of a call.
BODIES = ("object", "arguments", "parameters", "keywords", "dict")
_SLOT = regex.compile(r"\{(name|id|index|number|key|value|cdata|type|string|" + "|".join(BODIES) + r")\}")
_SLOT_PATTERNS = {
    "name": r"(?P<name>[\w.\-]++)",
    "id": r"(?P<id>[\w.:\-]*+)",
    "index": r"(?P<index>\d++)",
    "number": r"(?P<number>\d++)",
    "key": r"(?P<key>[^<>\"'\n{}=/]++)",
    "type": r"(?P<type>\w*+)",
    "string": r"(?P<string>\w*+)",
}


@dataclass(frozen=True)
class Notation:
    """How calls are written: `begin`, then `call` for each with `separator` between them, then `end`.

    Slots of `call`: {name}, {id}, {index} (from 0), {number} (from 1), and one for the arguments:
    {object}, which is {"name": …, "arguments": {…}} with the keys that `keys` says, or {"NAME": {…}} without any;
    {arguments}, a JSON object; {parameters}, where each is written as `parameter` says, with {key}, {value} (text as
    it is, or JSON), {type} or {string} (its type in words, or whether it is text); {keywords}, Python's keyword
    arguments; {dict}, Gemma's: bare keys, and text between <|"|>.

    White space may differ from what is written here, and `begin`, `end` and what comes after a body may be missing.
    """

    names: tuple[str, ...]  # of --tool-call-parser, as vLLM and SGLang call it
    call: str
    begin: str = ""
    end: str = ""
    separator: str = ""
    parameter: str = ""
    keys: tuple[str, str] | None = ("name", "arguments")
    call_id: str = ""  # the id of a call as the model writes it, a text with slots; empty: it writes none ahead
    also: tuple[str, ...] = ()  # other ways to begin a call, as regular expressions up to the body
    leading: bool = False  # an answer that has calls begins with one: nothing marks them among text
    nine_letters: bool = False  # ids have nine letters and digits
    shown: tuple[str, ...] = ()  # texts in a template that shows this notation in words only
    families: str = ""  # which models write so, for the documentation

    @functools.cached_property
    def body(self) -> str:
        """The slot that stands for the arguments."""
        return next(slot for slot in BODIES if "{" + slot + "}" in self.call)

    @functools.cached_property
    def head(self) -> str:
        """What a call begins with, up to its arguments."""
        return self.call.partition("{" + self.body + "}")[0]

    @functools.cached_property
    def tail(self) -> str:
        """What a call ends with, after its arguments."""
        return self.call.partition("{" + self.body + "}")[2]

    @functools.cached_property
    def starts(self) -> frozenset[str]:
        """The characters with which calls may begin."""
        return frozenset(map(_first_character, (_lenient(self.begin) + self._head, self._head, *self.also)))

    @functools.cached_property
    def first(self) -> regex.Pattern[str]:
        """The beginning of calls, up to the arguments of the first."""
        ways = [_lenient(self.begin) + r"\s*" + self._head, *self.also]
        if self.begin and _solid(_SLOT.split(self.head)[0]):
            ways.insert(1, self._head)  # without what should have come before the first
        return regex.compile("|".join(f"(?:{way})" for way in ways))

    @functools.cached_property
    def next(self) -> regex.Pattern[str]:
        """From the end of a call to the arguments of the one after it."""
        ways = [rf"(?:{_lenient(self.separator)}\s*)?{self._head}", *self.also]
        return regex.compile(r"\s*(?:" + "|".join(f"(?:{way})" for way in ways) + ")")

    @property
    def _head(self) -> str:
        return _lenient(self.head) + r"\s*" + self._body_begins

    @property
    def _body_begins(self) -> str:
        """What follows must be arguments, at least by their beginning: names in prose are no calls."""
        match self.body:
            case "object" | "arguments":
                return r"(?=\{)"
            case "parameters":
                begins = (_SLOT.split(self.parameter)[0], _SLOT.split(self.tail)[0])
                return "(?=" + "|".join(regex.escape(_solid(text)[0]) for text in begins) + ")"
            case _:
                return ""

    @functools.cached_property
    def parameter_head(self) -> regex.Pattern[str]:
        """What comes before a value of {parameters}."""
        return regex.compile(_lenient(self.parameter_parts[0].rstrip()))

    def parameter_closing(self, key: str) -> tuple[str, bool]:
        """What comes after the value of `key`, and whether a newline before it belongs to it."""
        after = self.parameter_parts[1]
        return after.strip().replace("{key}", key), after.startswith("\n")

    @staticmethod
    def slots(text: str) -> list[str]:
        """A text with slots in parts: by turns a text and the name of the slot after it."""
        return _SLOT.split(text)

    @functools.cached_property
    def parameter_parts(self) -> tuple[str, str]:
        """What stands before and after a value of {parameters}."""
        before, _, after = self.parameter.partition("{cdata}" if self.has_cdata else "{value}")
        return before, after

    @functools.cached_property
    def tail_parts(self) -> tuple[str, ...]:
        """The marks after the arguments of a call."""
        return tuple(_solid(self.tail))

    @functools.cached_property
    def end_parts(self) -> tuple[str, ...]:
        """The marks after the last call."""
        return tuple(_solid(self.end))

    @property
    def has_cdata(self) -> bool:
        """Whether values may stand in <![CDATA[…]]>."""
        return "{cdata}" in self.parameter

    @property
    def nesting(self) -> str:
        """What the tags within a value begin with, where values are tagged in turn; otherwise empty."""
        before, _, after = self.parameter.partition("{key}")
        return before if "{key}" in after else ""

    @functools.cached_property
    def markers(self) -> tuple[str, ...]:
        """Texts that some tokenizers take for special tokens, which answers leave out unless they are asked for."""
        parts = (self.begin, self.head, self.tail, self.end, self.separator, self.parameter)
        ways = (regex.sub(r"\\(.)", r"\1", regex.sub(r"\(\?[^)]*\)|\[[^]]*\]", " ", way)) for way in self.also)
        texts = [text for part in (*parts, *ways) for text in _marks(part)]
        return tuple(dict.fromkeys([*texts, *(['<|"|>'] if self.body == "dict" else [])]))

    def write(self, calls: Sequence[Json]) -> str:
        """Calls as the model writes them, each with `name` and `arguments`, maybe `id`."""
        written = (self._write(call, index) for index, call in enumerate(calls))
        return f"{self.begin}{self.separator.join(written)}{self.end}"

    def _write(self, call: Json, index: int) -> str:
        name, arguments, call_id = call["name"], call["arguments"], str(call.get("id") or "")
        filled = {
            "name": name,
            "id": call_id,
            "index": str(index),
            "number": str(index + 1),
            "arguments": _json(arguments),
            "object": _json({name: arguments} if self.keys is None else {self.keys[0]: name, self.keys[1]: arguments}),
            "parameters": "".join(self._parameter(key, value) for key, value in _items(arguments)),
            "keywords": ", ".join(f"{key}={_json(value)}" for key, value in _items(arguments)),
            "dict": ",".join(f"{key}:{_gemma(value)}" for key, value in _items(arguments)),
        }
        return _SLOT.sub(lambda slot: filled[slot[1]], self.call)

    def _parameter(self, key: str, value: Any) -> str:
        text = value if isinstance(value, str) else _json(value)
        if self.nesting and isinstance(value, (dict, list)):
            parts = value.items() if isinstance(value, dict) else (("item", item) for item in value)
            text = "".join(self._parameter(name, part) for name, part in parts)
        filled = {
            "key": key,
            "value": text,
            "cdata": text,
            "type": type_of(value),
            "string": "true" if isinstance(value, str) else "false",
        }
        return _SLOT.sub(lambda slot: filled[slot[1]], self.parameter)


@dataclass(frozen=True)
class Thoughts:
    """How a model tells its thoughts from its answer, and what other marks it puts around the parts of an answer."""

    names: tuple[str, ...]  # of --reasoning-parser
    opening: str
    closings: tuple[str, ...]  # the first of them is the one that is written
    anywhere: bool = False  # there may be several; otherwise they come first, if at all
    forced: str = ""  # what the prompt ends with where the model has to begin with thoughts, if not with `opening`
    dropped: tuple[str, ...] = ()  # regular expressions of marks that are neither thought nor text
    muted: str = ""  # a regular expression of what a message begins with that goes to no one here
    muted_ends: tuple[str, ...] = ()  # and what it ends with
    shown: tuple[str, ...] = ()  # texts in a template that shows it
    families: str = ""

    @functools.cached_property
    def open(self) -> regex.Pattern[str]:
        return regex.compile(_lenient(self.opening))

    @functools.cached_property
    def ways(self) -> tuple[tuple[str, regex.Pattern[str]], ...]:
        """What is looked for in text, in order: a kind and a pattern each."""
        ways = [("thought", self.open.pattern)] if self.anywhere else []
        ways += [("dropped", way) for way in self.dropped]
        ways += [("muted", self.muted)] if self.muted else []
        return tuple((kind, regex.compile(way)) for kind, way in ways)

    @property
    def starts(self) -> frozenset[str]:
        """The characters with which those may begin."""
        return frozenset(_first_character(way.pattern) for _, way in self.ways)

    def prompt_end(self, prompt: str) -> str:
        """The mark that a prompt ends with, from which the answer goes on; empty if there is none."""
        marks = filter(None, (self.opening.strip(), self.forced))
        return next((mark for mark in marks if prompt.rstrip().endswith(mark)), "")

    def is_open_in(self, text: str) -> bool:
        """Whether `text`, the beginning of an answer, leaves a thought open."""
        return bool(self.opening) and text.rfind(self.opening) > max(map(text.rfind, self.closings))

    @functools.cached_property
    def markers(self) -> tuple[str, ...]:
        plain = (regex.sub(r"\\(.)", r"\1", regex.sub(r"\(\?:|\)\??|\[[^]]*\][*+]*", " ", way)) for way in self.dropped)
        texts = [self.opening, *self.closings, *(text for way in plain for text in _marks(way))]
        return tuple(dict.fromkeys(texts))


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _items(arguments: Any) -> Iterator[tuple[str, Any]]:
    yield from arguments.items() if isinstance(arguments, Mapping) else ()


def _gemma(value: Any) -> str:
    match value:
        case str():
            return f'<|"|>{value}<|"|>'
        case list():
            return f"[{','.join(map(_gemma, value))}]"
        case dict():
            return "{" + ",".join(f"{key}:{_gemma(item)}" for key, item in value.items()) + "}"
        case _:
            return _json(value)


def _solid(text: str) -> list[str]:
    """The parts of a literal text between which white space may stand."""
    return [part for part in regex.split(r"\s+|(?<=\])(?=\[)|(?<=>)(?=[^>\[])", text) if part]


def _lenient(pattern: str) -> str:
    """A regular expression of a text with slots, with any white space, or none, where the text has some."""
    parts = _SLOT.split(pattern)
    seen: set[str] = set()
    written = []
    for index, part in enumerate(parts):
        if index % 2:
            slot = _SLOT_PATTERNS[part]
            written.append(slot if part not in seen else slot.replace(f"?P<{part}>", "?:"))
            seen.add(part)
        elif part:
            before, after = part[:1].isspace(), part[-1:].isspace()
            solid = r"\s*".join(map(regex.escape, _solid(part)))
            joined = (r"\s*" if before else "") + solid + (r"\s*" if after and solid else "")
            written.append(joined)
    return "".join(written)


def _first_character(pattern: str) -> str:
    return regex.sub(r"^(?:\(\?[:=]|\\s\*|\(\?P<\w+>|\\)*", "", pattern)[:1]


def _marks(text: str) -> list[str]:
    return regex.findall(r"<[^<>\s={}]+>|\[[A-Z_/]+\]|\]<\]\w+\[>\[", text)


HERMES = Notation(
    names=("hermes", "qwen", "qwen25", "qwen3", "mimo", "granite4"),
    call="<tool_call>\n{object}\n</tool_call>",
    separator="\n",
    families="Qwen 2.5, Qwen 3, QwQ, Hermes 2 and 3, MiMo, Granite 4, Bielik, Reka Edge; models that know no tools",
)
QWEN3_CODER = Notation(
    names=("qwen3_coder", "qwen3_xml", "nemotron_3", "step3p5", "mimo_v2"),
    call="<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>",
    separator="\n",
    parameter="<parameter={key}>\n{value}\n</parameter>\n",
    also=(r"<function=(?P<name>[\w.\-]++)>\s*(?=\S)",),
    families="Qwen 3 Coder, Qwen 3.5, Nemotron 3, Step 3.5",
)
SEED_OSS = Notation(
    names=("seed_oss",),
    call="<seed:tool_call>\n<function={name}>\n{parameters}</function>\n</seed:tool_call>",
    separator="\n",
    parameter="<parameter={key}>{value}</parameter>\n",
    families="Seed-OSS",
)
GLM45 = Notation(
    names=("glm45", "glm", "ling3", "poolside_v1"),
    call="<tool_call>{name}\n{parameters}</tool_call>",
    separator="\n",
    parameter="<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n",
    shown=("<arg_key>argument-key</arg_key>\\n<arg_value>",),
    families="GLM 4.5 and 4.6, Ling 3, Laguna",
)
GLM47 = Notation(
    names=("glm47", "spark25"),
    call="<tool_call>{name}{parameters}</tool_call>",
    parameter="<arg_key>{key}</arg_key><arg_value>{value}</arg_value>",
    families="GLM 4.7, Spark 2.5",
)
HUNYUAN3 = Notation(
    names=("hunyuan", "hunyuan3"),
    begin="<tool_calls:opensource>\n",
    call="<tool_call:opensource>{name}<tool_sep:opensource>\n{parameters}</tool_call:opensource>",
    separator="\n",
    end="\n</tool_calls:opensource>",
    parameter=(
        "<arg_key:opensource>{key}</arg_key:opensource>\n<arg_value:opensource>{value}</arg_value:opensource>\n"
    ),
    families="Hunyuan 3",
)
DEEPSEEK_V3 = Notation(
    names=("deepseek_v3", "deepseekv3", "deepseek_r1"),
    begin="<｜tool▁calls▁begin｜>",
    call="<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>",
    separator="\n",
    end="<｜tool▁calls▁end｜>",
    shown=("function<｜tool▁sep｜>", "'<｜tool▁sep｜>' + tool["),
    families="DeepSeek V3 and R1, R1 distills",
)
DEEPSEEK_V31 = Notation(
    names=("deepseek_v31", "deepseekv31"),
    begin="<｜tool▁calls▁begin｜>",
    call="<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>",
    end="<｜tool▁calls▁end｜>",
    families="DeepSeek V3.1",
)
_DSML = Notation(
    names=("deepseek_v32", "deepseekv32"),
    begin="<｜DSML｜function_calls>\n",
    call='<｜DSML｜invoke name="{name}">\n{parameters}</｜DSML｜invoke>',
    separator="\n",
    end="\n</｜DSML｜function_calls>",
    parameter='<｜DSML｜parameter name="{key}" string="{string}">{value}</｜DSML｜parameter>\n',
    families="DeepSeek V3.2",
)
DEEPSEEK_V32 = _DSML
DEEPSEEK_V4 = Notation(
    names=("deepseek_v4", "deepseekv4"),
    begin="<｜DSML｜tool_calls>\n",
    call=_DSML.call,
    separator=_DSML.separator,
    end="\n</｜DSML｜tool_calls>",
    parameter=_DSML.parameter,
    families="DeepSeek V4",
)
KIMI_K2 = Notation(
    names=("kimi_k2",),
    begin="<|tool_calls_section_begin|>",
    call="<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>",
    end="<|tool_calls_section_end|>",
    call_id="functions.{name}:{index}",
    shown=("<|tool_call_argument_begin|>",),
    families="Kimi K2",
)
KIMI_K3 = Notation(
    names=("kimi_k3",),
    begin="<|open|>tools<|sep|>",
    call='<|open|>call tool="{name}" index="{number}"<|sep|>{parameters}<|close|>call<|sep|>',
    end="<|close|>tools<|sep|>",
    parameter='<|open|>argument key="{key}" type="{type}"<|sep|>{value}<|close|>argument<|sep|>',
    families="Kimi K3",
)
MINIMAX_M1 = Notation(
    names=("minimax", "minimax_m1"),
    begin="<tool_calls>\n",
    call="{object}",
    separator="\n",
    end="\n</tool_calls>",
    families="MiniMax M1",
)
MINIMAX_M2 = Notation(
    names=("minimax_m2", "minimax-m2"),
    begin="<minimax:tool_call>\n",
    call='<invoke name="{name}">\n{parameters}</invoke>',
    separator="\n",
    end="\n</minimax:tool_call>",
    parameter='<parameter name="{key}">{value}</parameter>\n',
    families="MiniMax M2",
)
_M3 = "]<]minimax[>["
MINIMAX_M3 = Notation(
    names=("minimax_m3", "minimax-m3"),
    begin=f"{_M3}<tool_call>\n",
    call=f'{_M3}<invoke name="{{name}}">{{parameters}}{_M3}</invoke>',
    separator="\n",
    end=f"\n{_M3}</tool_call>",
    parameter=f"{_M3}<{{key}}>{{value}}{_M3}</{{key}}>",
    families="MiniMax M3",
)
GEMMA4 = Notation(
    names=("gemma4",),
    call="<|tool_call>call:{name}{{dict}}<tool_call|>",
    families="Gemma 4",
)
LFM2 = Notation(
    names=("lfm2",),
    begin="<|tool_call_start|>[",
    call="{name}({keywords})",
    separator=", ",
    end="]<|tool_call_end|>",
    shown=("<|tool_list_start|>", "<|tool_call_start|>", "List of tools: ["),
    families="LFM 2 and 2.5",
)
COMMAND_R7B = Notation(
    names=("cohere_command", "cohere_command4", "command_r7b"),
    begin="<|START_ACTION|>[\n    ",
    call='{"tool_call_id": "{index}", "tool_name": "{name}", "parameters": {arguments}}',
    separator=",\n    ",
    end="\n]<|END_ACTION|>",
    shown=("<|START_ACTION|>[",),
    families="Command R7B, Command A, North",
)
COMMAND_R_PLUS = Notation(
    names=("command_r_plus",),
    begin="Action:\n```json\n[\n    ",
    call="{object}",
    separator=",\n    ",
    end="\n]\n```",
    keys=("tool_name", "parameters"),
    families="Command R+",
)
FUNCTIONARY31 = Notation(
    names=("functionary31",),
    call="<function={name}>{arguments}</function>",
    families="functionary v3.1",
)
FUNCTIONARY32 = Notation(
    names=("functionary", "functionary32"),
    call=">>>{name}\n{arguments}",
    families="functionary v3.2",
)
FIREFUNCTION = Notation(
    names=("firefunction", "firefunction_v2"),
    begin=" functools[",
    call="{object}",
    separator=", ",
    end="]",
    shown=("functools[",),
    families="FireFunction v2",
)
GRANITE = Notation(
    names=("granite",),
    begin="<|tool_call|>[",
    call="{object}",
    separator=", ",
    end="]",
    shown=("<|tool_call|> followed by a JSON list",),
    families="Granite 3",
)
NEMOTRON_V2 = Notation(
    names=("nemotron_v2",),
    begin="<TOOLCALL>[",
    call="{object}",
    separator=", ",
    end="]</TOOLCALL>",
    families="Nemotron Nano 2",
)
APRIEL = Notation(
    names=("apriel",),
    begin="<tool_calls>[",
    call="{object}",
    separator=", ",
    end="]</tool_calls>",
    families="Apriel",
)
APERTUS = Notation(
    names=("apertus2509", "apertus"),
    begin="<|tools_prefix|>[",
    call="{object}",
    separator=", ",
    end="]<|tools_suffix|>",
    keys=None,
    families="Apertus",
)
GIGACHAT3 = Notation(
    names=("gigachat3",),
    call="<|message_sep|>\n\nfunction call<|role_sep|>\n{object}",
    families="GigaChat 3",
)
GIGACHAT31 = Notation(
    names=("gigachat31",),
    call="<|function_call|>{object}",
    families="GigaChat 3.1",
)
MINICPM5 = Notation(
    names=("minicpm5",),
    call='<function name="{name}">{parameters}</function>',
    separator="\n",
    parameter='<param name="{key}">{cdata}</param>',
    families="MiniCPM 5",
)
SOLAR = Notation(
    names=("solar_open",),
    begin="<|tool_calls|>",
    call="<|tool_call:begin|>{id}<|tool_call:name|>{name}<|tool_call:args|>{arguments}<|tool_call:end|>",
    end="<|calls|>",
    call_id="{id}",
    families="Solar Open",
)
MUSE = Notation(
    names=("muse",),
    call=(
        '<|start|>assistant to={name}<|message|><atem:function_calls>\n<atem:invoke name="{name}">\n'
        "{parameters}</atem:invoke>\n</atem:function_calls>"
    ),
    separator="<|eom|>",
    parameter='<atem:parameter name="{key}">{value}</atem:parameter>\n',
    families="Muse Glimmer",
)
_HARMONY_END = r"\s*(?:<\|constrain\|>)?(?:json)?\s*<\|message\|>\s*(?=\{)"
HARMONY = Notation(
    names=("openai", "gpt-oss", "harmony"),
    call="<|start|>assistant<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}<|call|>",
    also=(
        r"<\|start\|>assistant to=functions\.(?P<name>[\w.\-]++)\s*<\|channel\|>(?:commentary|analysis|final)"
        + _HARMONY_END,
        r"(?:<\|start\|>assistant\s*)?<\|channel\|>(?:commentary|analysis|final) to=functions\.(?P<name>[\w.\-]++)"
        + _HARMONY_END,
    ),
    shown=("<|channel|>commentary",),
    families="gpt-oss",
)
MISTRAL = Notation(
    names=("mistral",),
    begin="[TOOL_CALLS][",
    call="{object}",
    separator=", ",
    end="]",
    also=(r"\[TOOL_CALLS\]\s*(?P<name>[\w\-]++)(?:\[CALL_ID\](?P<id>\w*+))?(?:\[ARGS\])?\s*(?=\{)",),
    nine_letters=True,
    shown=("[TOOL_CALLS]",),
    families="Mistral up to v7: Nemo, Large, Small 3",
)
MISTRAL_V11 = Notation(
    names=("mistral_v11",),
    call="[TOOL_CALLS]{name}[CALL_ID]{id}[ARGS]{arguments}",
    call_id="{id}",
    also=MISTRAL.also,
    nine_letters=True,
    shown=("[CALL_ID]",),
    families="Mistral v11: Small 3.2",
)
MISTRAL_V13 = Notation(
    names=("mistral_v13",),
    call="[TOOL_CALLS]{name}[ARGS]{arguments}",
    call_id="{id}",
    also=MISTRAL.also,
    nine_letters=True,
    shown=("[ARGS]",),
    families="Mistral v13: Devstral, Magistral, Ministral 3",
)
LLAMA3 = Notation(
    names=("llama3_json", "llama3", "llama4_json"),
    call="{object}",
    separator="; ",
    keys=("name", "parameters"),
    also=(r"<\|python_tag\|>\s*(?=\{)", r",\s*(?=\{)"),
    leading=True,
    shown=("<|python_tag|>", '"parameters": dictionary'),
    families="Llama 3.1, 3.2 and 3.3",
)
PYTHONIC = Notation(
    names=("pythonic", "llama4_pythonic", "olmo3"),
    begin="[",
    call="{name}({keywords})",
    separator=", ",
    end="]",
    leading=True,
    shown=("[func_name1(params_name1=params_value1",),
    families="Llama 4, Llama 3.2 without JSON, OLMo 3",
)
# In the order in which a template's calls are compared with them: one that is part of another comes after it.
NOTATIONS = (
    HERMES,
    QWEN3_CODER,
    SEED_OSS,
    GLM45,
    GLM47,
    HUNYUAN3,
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    DEEPSEEK_V32,
    DEEPSEEK_V4,
    KIMI_K2,
    KIMI_K3,
    MINIMAX_M1,
    MINIMAX_M2,
    MINIMAX_M3,
    GEMMA4,
    LFM2,
    COMMAND_R7B,
    COMMAND_R_PLUS,
    FUNCTIONARY31,
    FUNCTIONARY32,
    FIREFUNCTION,
    GRANITE,
    NEMOTRON_V2,
    APRIEL,
    APERTUS,
    GIGACHAT3,
    GIGACHAT31,
    MINICPM5,
    SOLAR,
    MUSE,
    HARMONY,
    MISTRAL_V11,
    MISTRAL_V13,
    MISTRAL,
    PYTHONIC,
    LLAMA3,
)

THINK = Thoughts(
    names=(
        *("think", "qwen3", "qwen3-thinking", "deepseek_r1", "deepseek-r1", "deepseek_v3", "deepseek-v3", "glm45"),
        *("kimi_k2", "minimax", "minimax_m2", "nemotron_3", "step3", "step3p5"),
    ),
    opening="<think>",
    closings=("</think>",),
    shown=("</think>", "<|im_assistant|>"),
    families="Qwen 3, QwQ, DeepSeek, GLM, Kimi K2, MiniMax M2, Nemotron, Step, LFM 2.5 and most others",
)
MISTRAL_THINK = Thoughts(
    names=("mistral",), opening="[THINK]", closings=("[/THINK]",), shown=("[THINK]",), families="Magistral, Ministral 3"
)
SEED_THINK = Thoughts(
    names=("seed_oss",),
    opening="<seed:think>",
    closings=("</seed:think>",),
    shown=("<seed:think>",),
    families="Seed-OSS",
)
M3_THINK = Thoughts(
    names=("minimax_m3",),
    opening="<mm:think>",
    closings=("</mm:think>",),
    dropped=(r"</mm:think>",),
    shown=("<mm:think>",),
    families="MiniMax M3",
)
HUNYUAN_THINK = Thoughts(
    names=("hunyuan3",),
    opening="<think:opensource>",
    closings=("</think:opensource>",),
    shown=("<think:opensource>", "<think{}>"),
    families="Hunyuan 3",
)
COHERE_THINK = Thoughts(
    names=("command_r7b", "cohere"),
    opening="<|START_THINKING|>",
    closings=("<|END_THINKING|>",),
    dropped=(r"<\|(?:START|END)_(?:RESPONSE|TEXT)\|>",),
    shown=("<|START_THINKING|>",),
    families="Command R7B, Command A, North",
)
COMMAND_R_TEXT = Thoughts(
    names=("command_r_plus",),
    opening="",
    closings=(),
    dropped=(r"<\|CHATBOT_TOKEN\|>", r"<\|END_OF_TURN_TOKEN\|>"),
    shown=("<|CHATBOT_TOKEN|>",),
    families="Command R+ (none, only marks around the answer)",
)
GEMMA4_THINK = Thoughts(
    names=("gemma4",),
    opening="<|channel>thought\n",
    closings=("<channel|>",),
    anywhere=True,
    dropped=(r"<channel\|>", r"<\|channel>(?=<\|channel>)"),
    shown=("<|channel>thought",),
    families="Gemma 4",
)
HARMONY_THINK = Thoughts(
    names=("openai_gptoss", "gpt-oss", "harmony"),
    opening="<|channel|>analysis<|message|>",
    closings=("<|end|>",),
    anywhere=True,
    forced="<|start|>assistant",
    dropped=(
        r"<\|start\|>assistant(?=\s*<\|channel\|>(?:analysis|final|commentary)\s*<\|(?:message|constrain)\|>)",
        r"<\|start\|>assistant(?=\s*<\|channel\|>commentary to=assistant<\|channel\|>)",
        r"<\|channel\|>commentary to=assistant(?=<\|channel\|>)",
        r"<\|channel\|>(?:final|commentary)\s*(?:<\|constrain\|>)?(?:json)?\s*<\|message\|>",
        r"<\|(?:end|return|call)\|>",
    ),
    muted=(
        r"(?:<\|start\|>assistant)?(?: to=[\w.]++)?\s*<\|channel\|>\w++(?: to=[\w.]++)?\s*"
        r"(?:<\|constrain\|>)?\w*+<\|message\|>"
    ),
    muted_ends=("<|call|>", "<|end|>"),
    shown=("<|channel|>analysis<|message|>",),
    families="gpt-oss",
)
MUSE_THINK = Thoughts(
    names=("muse",),
    opening="<|start|>assistant to=self<|message|>",
    closings=("<|eom|>",),
    anywhere=True,
    forced="<|start|>assistant",
    dropped=(r"<\|start\|>assistant to=user<\|message\|>", r"<\|eo[mt]\|>"),
    shown=("to=self<|message|>", "to=self"),
    families="Muse Glimmer",
)
KIMI_K3_THINK = Thoughts(
    names=("kimi_k3",),
    opening="<|open|>think<|sep|>",
    closings=("<|close|>think<|sep|>", "<|open|>response<|sep|>"),
    dropped=(r"<\|(?:open|close)\|>response<\|sep\|>", r"<\|close\|>message<\|sep\|>", r"<\|end_of_msg\|>"),
    shown=("<|open|>think", "<|open|>"),
    families="Kimi K3",
)
SOLAR_THINK = Thoughts(
    names=("solar_open",),
    opening="<|begin|>assistant<|think|>",
    closings=("<|end|>",),
    anywhere=True,
    forced="<|begin|>assistant",
    dropped=(
        r"<\|begin\|>assistant\s*<\|content\|>",
        r"<\|begin\|>assistant(?=\s*<\|tool_calls\|>)",
        r"<\|(?:end|calls|flush)\|>",
    ),
    shown=("assistant<|think|>",),
    families="Solar Open",
)
APRIEL_THINK = Thoughts(
    names=("apriel",),
    opening="Here are my reasoning steps:\n",
    closings=("[BEGIN FINAL RESPONSE]",),
    dropped=(r"\[END FINAL RESPONSE\]", r"<\|end\|>"),
    shown=("[BEGIN FINAL RESPONSE]",),
    families="Apriel 1.5 and 1.6",
)
FUNCTIONARY_TEXT = Thoughts(
    names=("functionary",),
    opening="",
    closings=(),
    forced=">>>",
    dropped=(r">>>all\n",),
    shown=(">>>all", ">>>"),
    families="functionary v3.2 (none, only marks around the answer)",
)
LING_THINK = Thoughts(
    names=("ling",),
    opening="<think>",
    closings=("</think>",),
    dropped=(r"<\|role_end\|>",),
    shown=("<|role_end|>",),
    families="Ling 3",
)
GRANITE_THINK = Thoughts(
    names=("granite",),
    opening="<think>",
    closings=("</think>",),
    dropped=(r"</?response>",),
    shown=("<response></response>",),
    families="Granite 3",
)
# In the order in which they are looked for in a template: the peculiar ones first.
THOUGHTS = (
    LING_THINK,
    GRANITE_THINK,
    HARMONY_THINK,
    MUSE_THINK,
    KIMI_K3_THINK,
    GEMMA4_THINK,
    SOLAR_THINK,
    COHERE_THINK,
    APRIEL_THINK,
    FUNCTIONARY_TEXT,
    SEED_THINK,
    M3_THINK,
    HUNYUAN_THINK,
    MISTRAL_THINK,
    THINK,
    COMMAND_R_TEXT,
)
# By the names of the options; several are other servers' words for the same.
TOOL_CALL_PARSERS = {name: notation for notation in NOTATIONS for name in notation.names}
REASONING_PARSERS = {name: thoughts for thoughts in THOUGHTS for name in thoughts.names}
