"""The grammar of tool calls: in the notation of the model, of the functions that are offered, with their schemas.

What is made here is the `SamplingParams.tool_grammar` that grammar/compiler.py compiles: a list of entries as JSON, the
first of which is a Lark grammar that refers to the others by name. Knows notations and schemas, no models.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from mini_sglang.errors import FieldError
from mini_sglang.grammar.lark import ANY_TEXT, answer_entry, lark_string, spelled
from mini_sglang.sampling_params import Json, SamplingParams
from mini_sglang.text.json_types import resolved, types_of
from mini_sglang.text.notation import Notation, Thoughts
from mini_sglang.text.tokenizer import Tokenizer

_SLOT_TERMINALS = {"id": "/[a-zA-Z0-9]{9}/", "index": "/0|[1-9][0-9]?/", "number": "/[1-9][0-9]?/"}
_KEY = "/[a-zA-Z_][a-zA-Z0-9_]{0,63}/"
# What restricts texts, and cannot be held together with the end of a text that stands bare between tags.
_OF_TEXTS = ("pattern", "minLength", "maxLength", "format")
_DEEPEST = 16


def tool_call_grammar(
    functions: Mapping[str, Mapping[str, Any] | None],
    notation: Notation,
    tokenizer: Tokenizer,
    *,
    parallel: bool = True,
    free_text: bool = False,
    strict: Collection[str] = (),
    answer: SamplingParams | None = None,
    prompt_end: str = "",
    thoughts: Thoughts | None = None,
) -> str:
    """A grammar of one call, or with `parallel` of one or more, of functions with the schemas of their arguments.

    What no grammar can hold is refused for the functions of `strict`, and left to the model for others. With
    `free_text` the model may say anything before the first marker, or may say anything and call nothing. With `answer`
    it calls at once, or says what the grammar of `answer` allows. With `thoughts` it may think first. `prompt_end` is
    what the prompt ends with and would belong to the first call. Markers that are special tokens of the model are those
    tokens. For `SamplingParams.tool_grammar`. Raises FieldError if there is no function, or one cannot be held;
    ValueError if there is no marker that could end the free text.
    """
    if not functions:
        raise FieldError("tools", "must hold at least one function")
    special = {tokenizer.token_bytes(token_id).decode(): token_id for token_id in tokenizer.special_token_ids}
    return _CallsGrammar(functions, notation, special, strict).written(
        parallel, free_text, answer, prompt_end, thoughts
    )


class _CallsGrammar:
    """Collects the lines of the Lark grammar, and the grammars that those refer to."""

    def __init__(
        self,
        functions: Mapping[str, Mapping[str, Any] | None],
        notation: Notation,
        special: Mapping[str, int],
        strict: Collection[str],
    ) -> None:
        self._functions = functions
        self._notation = notation
        self._special = special
        self._strict = strict
        self._lines: list[str] = []
        self._entries: list[Json] = []
        self._closings: list[list[str | int]] = []  # of texts without quotes
        self._num_rules = 0

    def written(
        self,
        parallel: bool,
        free_text: bool,
        answer: SamplingParams | None,
        prompt_end: str,
        thoughts: Thoughts | None,
    ) -> str:
        notation, names = self._notation, list(self._functions)
        call = self._rule(self._call(name) for name in names)
        if free_text:
            opening, first = self._free(names)
            ways = [[*opening, first]]
        else:
            ways = [self._first(prompt_end, names, call)]
            if thoughts is not None and thoughts.opening:
                ways.append([*self._thought(thoughts, prompt_end), *self.text(notation.begin), call])
        more = ["(", *self.text(notation.separator), call, ")*"] if parallel else []
        others = ["|", "ANY"] if free_text else ["|", "@text"] if answer is not None else []
        if answer is not None:
            self._entries.append({"name": "text", "field": answer.grammar_field, **answer_entry(answer)})
        self._note_closing(self.text(notation.end))
        start = " ".join(["start:", self._rule(ways), *more, *self.text(notation.end), *others])
        lines = [start, f"ANY: {ANY_TEXT}", *self._lines]
        end = _parts(self.text(notation.end))
        entry = {"lark_grammar": "\n".join(lines), "closings": self._closings, "end": end}
        return json.dumps([entry, *self._entries])

    def _first(self, prompt_end: str, names: Sequence[str], call: str) -> list[str]:
        """The first call, without what the prompt has of it."""
        notation = self._notation
        if notation.begin or not notation.head.startswith(prompt_end) or not prompt_end:
            return [*self.text(notation.begin), call]
        head = notation.head.removeprefix(prompt_end)
        return [self._rule(self._call(name, head) for name in names)]

    def _free(self, names: Sequence[str]) -> tuple[list[str], str]:
        """Any text up to the first marker of calls, and the first call from behind that on."""
        notation = self._notation
        before = notation.slots(notation.begin + notation.head)[0]
        trigger = before.strip()
        if not trigger or notation.leading:
            raise ValueError("free text before a call needs a marker where it ends, and this notation has none")
        symbols = self.text(trigger)
        if symbols[0].startswith("<"):
            opening = ["ANY", *symbols]
        else:
            opening = [self._rule([["ANY", symbols[0]]], lazy=True), *symbols[1:]]
        rest = (notation.begin + notation.head)[before.index(trigger) + len(trigger) :]
        return opening, self._rule(self._call(name, rest) for name in names)

    def _thought(self, thoughts: Thoughts, prompt_end: str) -> list[str]:
        """Thoughts before the calls, without what the prompt has of them, and what begins the message after them."""
        self._lines.append(r"BETWEEN: /[ \n]{0,4}/")
        opening = self.text(thoughts.opening.removeprefix(prompt_end))
        begins = (self._notation.begin + self._notation.head).startswith(thoughts.forced)
        after = [] if begins else self.text(thoughts.forced)
        return [*opening, *self._up_to(self.text(thoughts.closings[0])), "BETWEEN", *after]

    def _up_to(self, closing: Sequence[str]) -> list[str]:
        """Any text up to and with a closing, which is not part of it."""
        self._note_closing(closing)
        if closing[0].startswith("<"):
            return ["ANY", *closing]
        return [self._rule([["ANY", closing[0]]], lazy=True), *closing[1:]]

    def _note_closing(self, closing: Sequence[str]) -> None:
        """Say what brings an answer nearer to its end, for one that comes near its limit."""
        parts = _parts(closing)
        if parts and parts not in self._closings:
            self._closings.append(parts)

    def _call(self, name: str, head: str | None = None) -> list[str]:
        """One call of a function; `head` instead of the notation's."""
        slots = {**_SLOT_TERMINALS, "name": lark_string(name)}
        before = self._filled(self._notation.head if head is None else head, slots)
        body, tail = self._body(name, self._functions[name]), self.text(self._notation.tail)
        self._note_closing(tail)  # else one optional argument might follow another
        return [*before, *body, *tail]

    def _filled(self, text: str, slots: Mapping[str, str]) -> list[str]:
        """A text with slots, for which these symbols stand."""
        symbols: list[str] = []
        for index, part in enumerate(self._notation.slots(text)):
            symbols += [slots[part]] if index % 2 else self.text(part)
        return symbols

    def _body(self, name: str, schema: Mapping[str, Any] | None) -> list[str]:
        keys = self._notation.keys
        match self._notation.body:
            case "object":
                before = f'"{keys[0]}": "{name}", "{keys[1]}"' if keys is not None else f'"{name}"'
                return [lark_string(f"{{{before}: "), self._json(name, schema or {"type": "object"}), '"}"']
            case "arguments":
                return [self._json(name, schema or {"type": "object"})]
            case "parameters":
                return self._tagged(name, schema)
            case "keywords":
                return self._listed(name, schema, "=", ", ")
            case _:
                return self._listed(name, schema, ":", ",")

    # -- arguments one by one -----------------------------------------------------------------------------------------

    def _properties(self, name: str, schema: Mapping[str, Any]) -> tuple[Mapping[str, Any], list[str]]:
        """The properties that arguments may have, and the names of those that they must have."""
        found = resolved(schema, schema)
        properties = found.get("properties") if isinstance(found, Mapping) else None
        others = {"allOf", "anyOf", "oneOf", "not", "patternProperties", "minProperties", "dependentRequired", "if"}
        if name in self._strict and isinstance(found, Mapping) and (extra := sorted(others & found.keys())):
            raise _refused(name, f"{extra[0]} of the arguments cannot be held in this model's notation of calls")
        required = found.get("required") if isinstance(found, Mapping) else None
        properties = properties if isinstance(properties, Mapping) else {}
        return properties, [key for key in required or () if key in properties]

    def _tagged(self, name: str, schema: Mapping[str, Any] | None) -> list[str]:
        before, after = self._notation.parameter_parts
        if schema is None:
            any_value = [*self._filled_key(before, None, None), *self._up_to(self.text(after))]
            return [self._rule([any_value]) + "*"]
        properties, required = self._properties(name, schema)
        symbols: list[str] = []
        for key in sorted(properties, key=lambda key: key not in required):
            part = properties[key]
            value = self._bare_value(name, key, part, schema, after)
            parameter = [*self._filled_key(before, key, types_of(part, schema)), *value]
            symbols += parameter if key in required else ["(", *parameter, ")?"]
        return symbols

    def _filled_key(self, text: str, key: str | None, types: frozenset[str] | None) -> list[str]:
        """What stands before a value."""
        of_type = {"string"} if types is None or ("string" in types and len(types) == 1) else types
        slots = {
            "key": _KEY if key is None else lark_string(key),
            "string": '"true"' if of_type == {"string"} else '"false"',
            "type": lark_string(min(of_type)),
        }
        return self._filled(text, slots)

    def _bare_value(self, name: str, key: str, schema: Any, root: Mapping[str, Any], after: str) -> list[str]:
        """A value and what stands after it: as JSON, or any text up to the closing tag."""
        closing = self.text(after.replace("{key}", key))
        found = resolved(schema, root)
        types = types_of(found, root)
        if "string" not in types:
            self._note_closing(closing)  # a number could go on
            return [self._json(name, _with_definitions(found, root), is_value=True), *closing]
        values = _listed_values(found)
        if values is not None:
            texts = (value if isinstance(value, str) else json.dumps(value, ensure_ascii=False) for value in values)
            return [self._rule([spelled(text)] for text in texts), *closing]
        self._refuse_text_rules(name, key, found)
        return self._up_to(closing)

    def _listed(self, name: str, schema: Mapping[str, Any] | None, equals: str, comma: str) -> list[str]:
        """Names and values with commas between them: those that must be there first."""
        if schema is None:
            pair = [_KEY, lark_string(equals), self._any_value(0)]
            return [f"({' '.join(pair)} ( {lark_string(comma)} {' '.join(pair)} )* )?"]
        properties, required = self._properties(name, schema)
        pairs = {
            key: [lark_string(key + equals), self._listed_value(name, key, part, schema, 0)]
            for key, part in properties.items()
        }
        return self._sequence(pairs, required, comma)

    def _sequence(self, pairs: Mapping[str, list[str]], required: Collection[str], comma: str) -> list[str]:
        """Pairs in their order, those of `required` first and always; a comma between any two."""
        separator = lark_string(comma)
        must = [pairs[key] for key in pairs if key in required]
        may = [pairs[key] for key in pairs if key not in required]
        symbols = [symbol for index, pair in enumerate(must) for symbol in ([separator] if index else []) + pair]
        if must:
            return [*symbols, *(symbol for pair in may for symbol in ("(", separator, *pair, ")?"))]
        rest = ""
        for index in range(len(may) - 1, -1, -1):  # the first that is there has no comma before it
            after = [symbol for pair in may[index + 1 :] for symbol in ("(", separator, *pair, ")?")]
            ways = [[*may[index], *after], *([[rest]] if rest else [])]
            rest = self._rule(ways)
        return [f"{rest}?"] if rest else []

    def _listed_value(self, name: str, key: str, schema: Any, root: Mapping[str, Any], depth: int) -> str:
        """A value among others: as JSON, or as Gemma writes it."""
        found = resolved(schema, root)
        if self._notation.body == "keywords":
            return self._json(name, _with_definitions(found, root), is_value=True)
        if not isinstance(found, Mapping) or depth > _DEEPEST:
            return self._any_value(depth)
        if (values := _listed_values(found)) is not None:
            return self._rule([self._gemma_constant(value) for value in values])
        types = types_of(found, root)
        ways: list[list[str]] = []
        if "string" in types:
            self._refuse_text_rules(name, key, found)
            ways.append(self._gemma_text())
        if "object" in types and isinstance(properties := found.get("properties"), Mapping):
            required = [part for part in found.get("required") or () if part in properties]
            pairs = {
                part: [lark_string(f"{part}:"), self._listed_value(name, part, properties[part], root, depth + 1)]
                for part in properties
            }
            ways.append(['"{"', *self._sequence(pairs, required, ","), '"}"'])
        elif "object" in types:
            ways.append([self._any_object(depth)])
        if "array" in types:
            item = self._listed_value(name, key, found.get("items", True), root, depth + 1)
            least = ["(", item, '(","', item, ")*", ")?"]
            ways.append(['"["', *least, '"]"'])
        scalars = sorted(types & {"number", "boolean", "null"})
        if scalars:
            plain = {**{k: v for k, v in found.items() if k not in ("anyOf", "oneOf")}, "type": scalars}
            if found.get("type") == "integer":
                plain["type"] = "integer"
            ways.append([self._json(name, plain, is_value=True)])
        return self._rule(ways)

    def _gemma_text(self) -> list[str]:
        quote = self.text('<|"|>')
        return [*quote, *self._up_to(quote)]

    def _gemma_constant(self, value: Any) -> list[str]:
        if isinstance(value, str):
            quote = self.text('<|"|>')
            return [*quote, *([spelled(value)] if value else []), *quote]
        return [lark_string(json.dumps(value))]

    def _any_value(self, depth: int) -> str:
        """Any value in the notation."""
        if self._notation.body == "keywords":
            self._entries.append({"name": (name := f"value_{len(self._entries)}"), "json_schema": {}, "strict": False})
            return f"@{name}"
        scalar = [["/-?[0-9]{1,15}(\\.[0-9]{1,15})?/"], ['"true"'], ['"false"'], ['"null"'], self._gemma_text()]
        if depth >= 3:
            return self._rule(scalar)
        inner = self._any_value(depth + 1)
        return self._rule([*scalar, ['"["', "(", inner, '(","', inner, ")*", ")?", '"]"'], [self._any_object(depth)]])

    def _any_object(self, depth: int) -> str:
        inner = self._any_value(depth + 1)
        pair = [_KEY, '":"', inner]
        return self._rule([['"{"', "(", *pair, '(","', *pair, ")*", ")?", '"}"']])

    def _refuse_text_rules(self, name: str, key: str, schema: Any) -> None:
        rules = [rule for rule in _OF_TEXTS if isinstance(schema, Mapping) and rule in schema]
        if rules and name in self._strict:
            raise _refused(name, f"{rules[0]} of {key} cannot be held, since this model writes texts without quotes")

    # -- pieces -------------------------------------------------------------------------------------------------------

    def _json(self, name: str, schema: Any, *, is_value: bool = False) -> str:
        """A value, or with `is_value` False all arguments of the function, as JSON."""
        entry = f"value_{len(self._entries)}" if is_value else f"arguments_{len(self._entries)}"
        self._entries.append(
            {"name": entry, "json_schema": schema, "strict": name in self._strict, "tool": name, "is_value": is_value}
        )
        return f"@{entry}"

    def _rule(self, ways: Iterable[Sequence[str]], *, lazy: bool = False) -> str:
        """A new rule that is any of these sequences of symbols; returns its name."""
        name = f"rule_{self._num_rules}"
        self._num_rules += 1
        alternatives = " | ".join(" ".join(way) if way else '""' for way in ways)
        self._lines.append(f"{name}{'[lazy]' if lazy else ''}: {alternatives}")
        return name

    def text(self, text: str) -> list[str]:
        """Symbols that spell a text: strings, and the special tokens among them by id."""
        tokens = filter(text.__contains__, self._special)
        found = min(tokens, key=lambda token: (text.index(token), -len(token)), default="")
        if not found:
            return [lark_string(text)] if text else []
        before, _, after = text.partition(found)
        return [*([lark_string(before)] if before else []), f"<[{self._special[found]}]>", *self.text(after)]


def _parts(symbols: Iterable[str]) -> list[str | int]:
    """What symbols stand for: texts, and ids of special tokens."""
    return [int(symbol[2:-2]) if symbol.startswith("<") else json.loads(symbol) for symbol in symbols]


def _listed_values(schema: Any) -> list[Any] | None:
    """The only values that a schema allows, if it lists them."""
    if not isinstance(schema, Mapping):
        return None
    if isinstance(values := schema.get("enum"), list) and values:
        return values
    return [schema["const"]] if "const" in schema else None


def _with_definitions(schema: Any, root: Mapping[str, Any]) -> Any:
    """A part of a schema that stands alone."""
    kept = {key: root[key] for key in ("$defs", "definitions") if key in root}
    return {**schema, **kept} if isinstance(schema, Mapping) else schema


def _refused(name: str, problem: str) -> FieldError:
    return FieldError("tools", f'cannot be followed: tool "{name}": {problem}')
