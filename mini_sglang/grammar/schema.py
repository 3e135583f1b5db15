"""Turns a JSON schema as generators write it into one that llguidance follows to its end, or says why there is none.

The result allows nothing that the schema forbids, but for keywords that no grammar can hold: those are left out, or
refused where the schema is strict. It is in the terms of draft 2020-12, with every reference to a definition of its
own. Knows JSON schemas and which of them a grammar can be made of; does not know vocabularies and requests.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from functools import cache, lru_cache
from itertools import combinations
from typing import Any
from urllib.parse import unquote

from llguidance import LLMatcher, LLTokenizer

from mini_sglang.errors import shorten
from mini_sglang.grammar import recursion
from mini_sglang.grammar.number_bounds import UnheldBounds, bounds_of
from mini_sglang.grammar.patterns import fault_of
from mini_sglang.sampling_params import Json

Schema = Json | bool

_TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
_MAX_DEPTH = 100
_MAX_ITEMS = 10_000  # an upper bound beyond is lowered to it, which is beyond any answer
_MAX_LENGTH = 1_000_000
_MAX_SETS = 64  # of properties that stand for `minProperties` or `maxProperties`
_MAX_MIN_LENGTH = 100_000
_DATE = (
    r"(?:(?:000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    r"|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
    r"|(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)-02-29)"
)
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_OWN_FORMATS = {"date": f"^{_DATE}$", "time": f"^{_TIME}$", "date-time": f"^{_DATE}T{_TIME}$"}
_LIBRARY_FORMATS = ("duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
# Formats that JSON Schema defines and no grammar here holds. All others are notes to the reader, as "int64" is.
_OTHER_FORMATS = (
    *("idn-email", "idn-hostname", "uri-reference", "iri", "iri-reference", "uri-template"),
    *("json-pointer", "relative-json-pointer", "regex"),
)
# Keywords that say what is valid, and that no grammar holds.
_UNSUPPORTED = (
    *("uniqueItems", "contains", "not", "if", "propertyNames", "dependentRequired", "dependentSchemas", "dependencies"),
    *("unevaluatedProperties", "unevaluatedItems", "$dynamicRef", "$recursiveRef"),
)
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")


class SchemaError(ValueError):
    """A schema is malformed, or cannot be followed. The message says where, and which keyword it is about."""

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(f'property "{shorten(path, 120)[1:-1]}": {problem}' if path else problem)


def followable(schema: Schema, *, strict: bool, blame: bool = False) -> Json:
    """A schema that a grammar holds in all its keywords. Raises SchemaError.

    What no grammar can hold is refused if `strict`, and otherwise left out. With `blame` the result is tried, and if no
    grammar can be made of it, the error names the part that is at fault; without, it is left to be found out.
    """
    preparation = _Preparation(schema, strict)
    prepared = preparation.result()
    if blame and _problem_of(prepared):
        preparation.blame(prepared.get("$defs", {}))
    return prepared


@lru_cache(512)  # agents send the same tools in each request
def parameter_problem(text: str) -> str:
    """Why the JSON text of a tool's parameters is malformed, or fits no object, as far as reading alone tells."""
    schema = json.loads(text)
    try:
        prepared = _Preparation(schema, strict=False, tries=False).result()
        types = recursion.types_of(prepared, prepared.get("$defs", {}))
    except SchemaError as error:
        return str(error)
    except RecursionError:
        return "the schema is nested too deeply"
    if "object" in types:
        return ""
    got = f"a schema of type {shorten(schema['type'])}" if "type" in schema else "one that no object fits"
    return f"the schema must describe an object, got {got}"


class _Preparation:
    """One schema on its way. Paths are for readers: the names of properties, and [] for items.

    Unless it `tries` parts with llguidance, the result is good for no grammar.
    """

    def __init__(self, root: Schema, strict: bool, *, tries: bool = True) -> None:
        self._root = root
        self._strict = strict
        self._tries = tries
        self._names: dict[str, str] = {}  # of definitions in the result, by where they are in the root
        self._pending: list[tuple[str, Schema, str]] = []
        self._ids: dict[str, str] | None = None
        self._nodes: list[tuple[str, Json]] = []  # what was prepared, the innermost first

    def result(self) -> Json:
        prepared = self._schema(self._root, "", 0)
        definitions: dict[str, Schema] = {}
        while self._pending:
            name, schema, path = self._pending.pop()
            definitions[name] = self._schema(schema, path, 0)
        whole: Json = {**_as_object(prepared), "$defs": definitions} if definitions else _as_object(prepared)
        if definitions:
            self._refuse_loops(definitions)
            self._leave_out_endless(whole)
            if self._tries:
                self._disentangle(whole)
        return whole

    def _schema(self, schema: Schema, path: str, depth: int) -> Schema:
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise SchemaError(path, f"a schema must be an object or a boolean, got {shorten(schema)}")
        if depth > _MAX_DEPTH:
            raise SchemaError(path, f"the schema is nested more than {_MAX_DEPTH} deep")
        given = {key: value for key, value in schema.items() if value is not None or key == "const"}
        prepared: Json = {}
        self._simple_keywords(given, prepared, path)
        self._array_keywords(given, prepared, path, depth)
        self._object_keywords(given, prepared, path, depth)
        self._combinations(given, prepared, path, depth)
        self._unsupported(given, path)
        self._nodes.append((path, prepared))
        if given.get("nullable") is True:  # of OpenAPI
            return {"anyOf": [prepared, {"type": "null"}]}
        return prepared

    def _leave_out(self, path: str, keyword: str, why: str = "cannot be held to by a grammar") -> None:
        if self._strict:
            raise SchemaError(path, f"{keyword} {why}, so that a strict schema must not have it")

    def _unsupported(self, given: Json, path: str) -> None:
        for keyword in _UNSUPPORTED:
            if keyword in given and not _says_nothing(keyword, given):
                self._leave_out(path, keyword)

    # -- single values ------------------------------------------------------------------------------------------------

    def _simple_keywords(self, given: Json, prepared: Json, path: str) -> None:
        if "type" in given:
            types = [given["type"]] if isinstance(given["type"], str) else given["type"]
            if not isinstance(types, list) or not types or any(kind not in _TYPES for kind in types):
                raise SchemaError(
                    path, f"type must be one of {', '.join(_TYPES)}, or a list of them, got {types}"[:300]
                )
            prepared["type"] = given["type"]
        if "enum" in given:
            if not isinstance(given["enum"], list) or not given["enum"]:
                raise SchemaError(path, "enum must be a list of at least one value")
            if all(self._takes_value(value, path, "enum") for value in given["enum"]):
                prepared["enum"] = given["enum"]
        if "const" in given and self._takes_value(given["const"], path, "const"):
            prepared["const"] = given["const"]
        for keyword in _COUNTS:
            if keyword in given:
                given[keyword] = _count(given[keyword], path, keyword)
        self._bounds(given, prepared, path)
        self._string_keywords(given, prepared, path)

    def _takes_value(self, value: Any, path: str, keyword: str) -> bool:
        """Whether a constant is written as it is: llguidance makes floats of its integers, and crashes at the least."""
        if isinstance(value, dict):
            value = list(value.values())
        if isinstance(value, list):
            return all(self._takes_value(item, path, keyword) for item in value)
        if isinstance(value, float) and not abs(value) < float("inf"):
            raise SchemaError(path, f"{keyword} must not hold a number that is not finite")
        if not isinstance(value, int) or _is_exact(value):
            return True
        if -(2**63) <= value < 2**63:
            problem = f"{keyword} may hold no integer that a float of 64 bits does not hold, got {shorten(value)}"
        else:
            problem = f"{keyword} may hold integers of 64 bits, got {shorten(value)}"
        self._refuse_if_strict(path, problem)
        return False

    def _bounds(self, given: Json, prepared: Json, path: str) -> None:
        try:
            prepared |= bounds_of(given)
        except UnheldBounds as error:
            self._refuse_if_strict(path, str(error))
            self._bounds({key: value for key, value in given.items() if key not in error.keywords}, prepared, path)
        except ValueError as error:
            raise SchemaError(path, str(error)) from None

    def _refuse_if_strict(self, path: str, problem: str) -> None:
        """For a value that is valid, and beyond what a grammar holds; without `strict` it is left out."""
        if self._strict:
            raise SchemaError(path, problem)

    def _string_keywords(self, given: Json, prepared: Json, path: str) -> None:
        self._counts("Length", given, prepared, path, largest_least=_MAX_MIN_LENGTH, largest_most=_MAX_LENGTH)
        patterns = []
        if "pattern" in given and self._takes_pattern(given["pattern"], path, "pattern"):
            patterns.append(given["pattern"])
        kind = given.get("format")
        if kind in _OWN_FORMATS:
            patterns.append(_OWN_FORMATS[kind])
        elif kind in _LIBRARY_FORMATS:
            prepared["format"] = kind
        elif kind in _OTHER_FORMATS:
            self._leave_out(path, f'format "{kind}"')
        if patterns:
            prepared["pattern"] = patterns[0]
        if patterns[1:]:
            prepared.setdefault("allOf", []).append({"pattern": patterns[1]})

    def _counts(
        self, of: str, given: Json, prepared: Json, path: str, *, largest_least: int, largest_most: int
    ) -> None:
        """Keep `min…` and `max…`, as far as a grammar counts."""
        least, most = f"min{of}", f"max{of}"
        if least in given:
            if given[least] > largest_least:
                self._refuse_if_strict(path, f"{least} may be at most {largest_least}")
            else:
                prepared[least] = given[least]
        if most in given:
            prepared[most] = min(given[most], largest_most)

    def _takes_pattern(self, pattern: Any, path: str, keyword: str) -> bool:
        """Whether a grammar holds it. Raises SchemaError if it is a regular expression in no dialect."""
        if not isinstance(pattern, str):
            raise SchemaError(path, f"{keyword} must be a regular expression, got {shorten(pattern)}")
        problem = _problem_of({"type": "string", "pattern": pattern}) if self._tries else "not tried"
        # llguidance lets a backslash escape what it puts behind the pattern
        if (problem or pattern.endswith("\\")) and (fault := fault_of(pattern)):
            raise SchemaError(path, f"{keyword} {shorten(pattern)} is no regular expression: {fault}")
        if "nsatisfiable" in problem:
            raise SchemaError(path, f"{keyword} {shorten(pattern)} matches no text")
        if problem:
            self._leave_out(path, f"{keyword} {shorten(pattern)}", _pattern_in_words(problem))
        return not problem

    # -- arrays and objects -------------------------------------------------------------------------------------------

    def _array_keywords(self, given: Json, prepared: Json, path: str, depth: int) -> None:
        prefix, rest = given.get("prefixItems"), given.get("items")
        if isinstance(rest, list):  # before draft 2020-12
            prefix, rest = rest, given.get("additionalItems")
        if prefix is not None:
            if not isinstance(prefix, list):
                raise SchemaError(path, f"prefixItems must be a list of schemas, got {shorten(prefix)}")
            prepared["prefixItems"] = [
                self._schema(item, f"{path}[{index}]", depth + 1) for index, item in enumerate(prefix)
            ]
        if rest is not None:
            prepared["items"] = self._schema(rest, f"{path}[]", depth + 1)
        self._counts("Items", given, prepared, path, largest_least=_MAX_ITEMS, largest_most=_MAX_ITEMS)

    def _object_keywords(self, given: Json, prepared: Json, path: str, depth: int) -> None:
        required = given.get("required", [])
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            raise SchemaError(path, "required must be a list of names")
        properties = self._named(given, "properties", path, depth)
        patterns = self._named(given, "patternProperties", path, depth)
        patterns = {
            key: value for key, value in patterns.items() if self._takes_pattern(key, path, "patternProperties")
        }
        others = given.get("additionalProperties")
        if others is None and given.get("unevaluatedProperties") is False and _is_plain(given):
            others = False
        if others is not None:
            others = self._schema(others, f"{path}.*" if path else "*", depth + 1)
        names = given.get("propertyNames")
        if names is not None and _names_are_listed(given):
            properties |= {name: True if others is None else others for name in names["enum"] if name not in properties}
            others = False
        elif (
            names is not None
            and _names_have_a_pattern(given)
            and self._takes_pattern(names["pattern"], path, "propertyNames")
        ):
            patterns, others = {names["pattern"]: True if others is None else others}, False
        if patterns and self._tries:
            patterns, others = _without_empty_patterns(properties, patterns, others)
        for keyword, value in (("properties", properties), ("patternProperties", patterns), ("required", required)):
            if value:
                prepared[keyword] = value
        if others is not None:
            prepared["additionalProperties"] = others
        self._property_counts(given, prepared, path)

    def _property_counts(self, given: Json, prepared: Json, path: str) -> None:
        """`minProperties` and `maxProperties`, as llguidance takes them where all names are open.

        Where all are known, one of the sets of properties that may be there, or have to be, must fit.
        """
        names, required = list(prepared.get("properties", ())), set(prepared.get("required", ()))
        least, most = max(given.get("minProperties", 0) - len(required), 0), given.get("maxProperties")
        if not names and not required:
            if least:
                prepared["minProperties"] = min(least, _MAX_ITEMS)
            if least > 1:  # a name that comes twice counts twice
                self._leave_out(path, "minProperties")
            if most is not None:
                prepared["maxProperties"] = min(most, _MAX_ITEMS)
            return
        free = [name for name in names if name not in required]
        most = None if most is None else most - len(required)
        is_closed = prepared.get("additionalProperties") is False and "patternProperties" not in prepared
        if (most is not None and most < 0) or (is_closed and least > len(free)):
            raise SchemaError(path, "minProperties, maxProperties, properties and required together allow no value")
        choices: list[Json] = []
        if least and is_closed and math.comb(len(free), least) <= _MAX_SETS:
            choices.append({"anyOf": [{"required": list(some)} for some in combinations(free, least)]})
        elif least:
            self._leave_out(path, "minProperties")
        if most is not None and (most < len(free) or not is_closed):
            if is_closed and math.comb(len(free), most) <= _MAX_SETS:
                absent = combinations(free, len(free) - most)
                choices.append({"anyOf": [{"properties": dict.fromkeys(some, False)} for some in absent]})
            else:
                self._leave_out(path, "maxProperties")
        if choices:
            prepared["allOf"] = [*prepared.get("allOf", []), *choices]

    def _named(self, given: Json, keyword: str, path: str, depth: int) -> dict[str, Schema]:
        schemas = given.get(keyword, {})
        if not isinstance(schemas, dict):
            raise SchemaError(path, f"{keyword} must be an object of schemas, got {shorten(schemas)}")
        return {
            name: self._schema(schema, f"{path}.{name}" if path else name, depth + 1)
            for name, schema in schemas.items()
        }

    # -- combinations -------------------------------------------------------------------------------------------------

    def _combinations(self, given: Json, prepared: Json, path: str, depth: int) -> None:
        if "$ref" in given:
            prepared["$ref"] = self._definition(given["$ref"], path)
        together = prepared.setdefault("allOf", [])
        together += self._alternatives(given, "allOf", path, depth)
        either = self._alternatives(given, "anyOf", path, depth)
        one = self._alternatives(given, "oneOf", path, depth)
        if one and not self._are_disjoint(given["oneOf"]):
            self._leave_out(path, "oneOf", "has alternatives that may fit at once, which a grammar cannot rule out")
        if either and one:
            together.append({"anyOf": one})
        if either or one:
            prepared["anyOf"] = either or one
        if not together:
            del prepared["allOf"]

    def _alternatives(self, given: Json, keyword: str, path: str, depth: int) -> list[Schema]:
        if keyword not in given:
            return []
        schemas = given[keyword]
        if not isinstance(schemas, list) or not schemas:
            raise SchemaError(path, f"{keyword} must be a list of at least one schema, got {shorten(schemas)}")
        return [self._schema(schema, path, depth + 1) for schema in schemas]

    def _are_disjoint(self, schemas: list[Schema]) -> bool:
        facts = [_Facts.of(self._resolved(schema)) for schema in schemas]
        return all(one.is_apart_from(other) for index, one in enumerate(facts) for other in facts[index + 1 :])

    def _resolved(self, schema: Schema) -> Json:
        """The schema, with what its references say beside what it says itself."""
        merged: Json = {}
        for _ in range(_MAX_DEPTH):
            if not isinstance(schema, dict):
                break
            merged = {**schema, **merged}
            reference = schema.get("$ref")
            parts = schema.get("allOf")
            if isinstance(reference, str):
                schema = self._target(reference, "")
            elif isinstance(parts, list) and len(parts) == 1:
                schema = parts[0]
            else:
                break
        return merged

    # -- references ---------------------------------------------------------------------------------------------------

    def _definition(self, reference: Any, path: str) -> str:
        """What to write for a reference; the definition itself will be prepared once."""
        if not isinstance(reference, str):
            raise SchemaError(path, f"$ref must be text, got {shorten(reference)}")
        if reference not in self._names:
            self._names[reference] = f"d{len(self._names)}"
            target = self._target(reference, path)
            self._pending.append((self._names[reference], target, reference.rpartition("/")[2].strip("#")))
        return f"#/$defs/{self._names[reference]}"

    def _target(self, reference: str, path: str) -> Schema:
        base, _, pointer = reference.partition("#")
        node: Any = self._root
        if base or (pointer and not pointer.startswith("/")):
            where = self._all_ids().get(base or f"#{pointer}")
            if where is None:
                raise SchemaError(path, f"$ref {shorten(reference)} is not to a part of the schema itself")
            node = _at(self._root, where)
            pointer = pointer if base else ""
        node = _at(node, pointer) if node is not None else None
        if not isinstance(node, (dict, bool)):
            raise SchemaError(path, f"$ref {shorten(reference)} leads to no schema")
        return node

    def _all_ids(self) -> dict[str, str]:
        """Where the parts of the root are that have an $id or $anchor."""
        if self._ids is None:
            self._ids = {}
            for where, node in _walk(self._root):
                for keyword, prefix in (("$id", ""), ("id", ""), ("$anchor", "#")):
                    if isinstance(node.get(keyword), str):
                        self._ids.setdefault(prefix + node[keyword].rstrip("#"), where)
        return self._ids

    def _refuse_loops(self, definitions: Mapping[str, Schema]) -> None:
        """Refuse a schema that refers to itself with no property or item in between."""
        if loops := recursion.immediate_loops(definitions):
            raise SchemaError("", f"$ref {self._reference(loops)} refers to itself, with nothing in between")

    def _leave_out_endless(self, whole: Json) -> None:
        """Refuse a schema that only values without end fit, and leave out where it may lead into one."""
        definitions: dict[str, Schema] = whole["$defs"]
        dead = recursion.endless(definitions)
        if not recursion.has_an_end(whole, definitions, dead):
            problem = f"$ref {self._reference(dead)} needs a value of itself in each value: none that ends fits"
            raise SchemaError("", problem)
        if dead:
            for name in dead:
                del definitions[name]
            for schema in (whole, *definitions.values(), *(node for _, node in self._nodes)):
                recursion.leave_out(schema, dead)
            gone = {f"#/$defs/{name}" for name in dead}
            self._nodes = [(path, node) for path, node in self._nodes if node.get("$ref") not in gone]

    def _disentangle(self, whole: Json) -> None:
        """Keep nothing but the reference where one leads back to where it is, with more beside it than it says."""
        while entangled := recursion.entangled(whole["$defs"]):
            if not _problem_of(whole):
                return
            for node in {id(node): node for node in entangled}.values():
                path = next((path for path, known in self._nodes if known is node), "")
                others = recursion.keep_reference(node)
                self._leave_out(path, f"{others} beside a $ref that leads back to where it is")

    def _reference(self, names: set[str]) -> str:
        """The first of these definitions, as the schema refers to it."""
        return shorten(next(reference for reference, name in self._names.items() if name in names))

    def blame(self, definitions: Mapping[str, Schema]) -> None:
        """Raise SchemaError for the innermost part of which no grammar can be made."""
        for path, node in self._nodes[:2000]:
            alone = {**node, "$defs": definitions} if definitions else node
            if problem := _problem_of(alone):
                raise SchemaError(path, _in_words(problem, node))
        raise SchemaError("", "no grammar can be made of the schema")


class _Facts:
    """What tells values of one schema from those of another: types, constants, constants of required properties."""

    def __init__(self, types: set[str], values: set[str] | None, tags: dict[str, set[str]]) -> None:
        self.types = types
        self.values = values
        self.tags = tags

    @classmethod
    def of(cls, schema: Json) -> _Facts:
        values = _constants(schema)
        kinds = schema.get("type", _TYPES)
        types = {kinds} if isinstance(kinds, str) else set(kinds) if isinstance(kinds, (list, tuple)) else set(_TYPES)
        if "integer" in types:
            types = (types - {"integer"}) | {"number"}
        if schema.get("nullable") is True:
            return cls({*types, "null"}, None, {})
        properties, required = schema.get("properties"), schema.get("required")
        tags: dict[str, set[str]] = {}
        if isinstance(properties, dict) and isinstance(required, list) and types == {"object"}:
            for name in required:
                part = properties.get(name) if isinstance(name, str) else None
                if isinstance(part, dict) and (constants := _constants(part)) is not None:
                    tags[name] = constants
        return cls(types, values, tags)

    def is_apart_from(self, other: _Facts) -> bool:
        if not self.types & other.types:
            return True
        if self.values is not None and other.values is not None and not self.values & other.values:
            return True
        return any(not self.tags[name] & other.tags[name] for name in self.tags.keys() & other.tags.keys())


def _constants(schema: Json) -> set[str] | None:
    if "const" in schema:
        return {json.dumps(_by_value(schema["const"]), sort_keys=True)}
    if isinstance(schema.get("enum"), list):
        return {json.dumps(_by_value(value), sort_keys=True) for value in schema["enum"]}
    return None


def _by_value(value: Any) -> Any:
    """A constant with its numbers in the one form that they share with all equal ones."""
    if isinstance(value, list):
        return [_by_value(item) for item in value]
    if isinstance(value, dict):
        return {key: _by_value(item) for key, item in value.items()}
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _as_object(schema: Schema) -> Json:
    if schema is False:
        raise SchemaError("", "the schema allows no value")
    return {} if schema is True else dict(schema)


def _is_exact(value: int) -> bool:
    """Whether llguidance writes an integer as it is."""
    return value == 2**63 - 1 or (abs(value) <= 2**63 - 1024 and int(float(value)) == value)


def _count(value: Any, path: str, keyword: str) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0 or value != value:
        raise SchemaError(path, f"{keyword} must be an integer that is at least 0, got {shorten(value)}")
    if value == float("inf"):
        return _MAX_LENGTH if keyword.startswith("max") else 2**63
    if value != int(value):
        raise SchemaError(path, f"{keyword} must be an integer that is at least 0, got {shorten(value)}")
    return int(value)


def _says_nothing(keyword: str, given: Json) -> bool:
    """Whether a keyword that no grammar holds is held anyway."""
    value = given[keyword]
    match keyword:
        case "uniqueItems":
            return value is False or given.get("maxItems", 2) <= 1
        case "not":
            return value is False
        case "contains":
            return bool(given.get("minContains") == 0) and "maxContains" not in given
        case "if":
            return "then" not in given and "else" not in given
        case "propertyNames":
            plain = value is True or (isinstance(value, dict) and not value.keys() - {"type", "$schema", "title"})
            types = value.get("type", "string") if isinstance(value, dict) else "string"
            return (plain and types == "string") or _names_are_listed(given) or _names_have_a_pattern(given)
        case "unevaluatedProperties":
            return value is True or value == {} or _is_plain(given)
        case "unevaluatedItems":
            return value is True or value == {} or given.get("items") is False
        case "dependentRequired" | "dependentSchemas" | "dependencies":
            return bool(value == {})
    return False


def _is_plain(given: Json) -> bool:
    """Whether all properties that a schema speaks of are in its own keywords."""
    return not given.keys() & {"$ref", "allOf", "anyOf", "oneOf", "if", "dependentSchemas", "not"}


def _names_are_listed(given: Json) -> bool:
    names = given.get("propertyNames")
    if not isinstance(names, dict) or given.get("patternProperties") or names.keys() - {"enum", "type"}:
        return False
    listed = names.get("enum")
    closed = not set(given.get("properties") or ()) - set(listed if isinstance(listed, list) else ())
    return isinstance(listed, list) and all(isinstance(name, str) for name in listed) and closed


def _names_have_a_pattern(given: Json) -> bool:
    names = given.get("propertyNames")
    alone = not given.get("patternProperties") and not given.get("properties") and not given.get("required")
    return isinstance(names, dict) and "pattern" in names and not names.keys() - {"pattern", "type"} and alone


def _without_empty_patterns(
    properties: dict[str, Schema], patterns: dict[str, Schema], others: Schema | None
) -> tuple[dict[str, Schema], Schema | None]:
    """Leave out patterns, and other properties, for which no name is left beside the named ones.

    llguidance would let an answer begin such a property and find no name for it. What a pattern says about the names
    that it shares goes to those, in `properties` itself.
    """
    kept: dict[str, Schema] = {}
    taken: dict[str, Schema] = dict.fromkeys(properties, False)
    for pattern, schema in patterns.items():
        if _has_a_property({"properties": taken, "patternProperties": {pattern: {}}, "additionalProperties": False}):
            kept[pattern] = schema
            continue
        alone = {"type": "object", "patternProperties": {pattern: {}}, "additionalProperties": False}
        for name in properties:
            if _takes(alone, json.dumps({name: 0}, ensure_ascii=False, separators=(",", ":"))):
                properties[name] = {"allOf": [properties[name], schema]}
    all_taken: Json = {"properties": taken, "patternProperties": dict.fromkeys(patterns, False)}
    if others is not False and not _has_a_property({**all_taken, "additionalProperties": {}}):
        others = False
    return kept, others


# -- what llguidance makes of a schema, tried with a vocabulary of single bytes ---------------------------------------


@cache
def bytes_alone() -> LLTokenizer:
    """A vocabulary of single bytes, to find out what a grammar takes without a model."""
    return LLTokenizer("byte")


def _matcher(schema: Json) -> LLMatcher:
    options = {"whitespace_flexible": False, "lenient": False, "coerce_one_of": False}
    grammar = json.dumps({"grammars": [{"json_schema": {**schema, "x-guidance": options}}]})
    return LLMatcher(bytes_alone(), grammar, log_level=0)


def _problem_of(schema: Json) -> str:
    matcher = _matcher(schema)
    return str(matcher.get_error()) if matcher.is_error() else ""


def _takes(schema: Json, text: str) -> bool:
    matcher = _matcher(schema)
    tokens = list(text.encode())
    return bool(matcher.try_consume_tokens(tokens) == len(tokens))


def _has_a_property(schema: Json) -> bool:
    """Whether an object of this schema, which requires nothing, can have a property."""
    return _takes({"type": "object", **schema}, '{"')


def _in_words(problem: str, node: Json) -> str:
    """What is wrong with a part of a schema, by what llguidance says of it."""
    if "nsatisfiable" in problem:
        return f"{_keywords(node)} together allow no value"
    if "not disjoint" in problem:
        return "patternProperties has patterns that may match one name, of which no grammar can be made"
    if "pattern" in node and "regex" in problem:
        return f"pattern {shorten(node['pattern'])} is too complex, here with {_keywords(node)}"
    if any(word in problem for word in ("too large", "too complex", "limit", "fuel", "too many")):
        return f"{_keywords(node)} make too large a grammar"
    return f"no grammar can be made of {_keywords(node)} together"


def _pattern_in_words(problem: str) -> str:
    """What of a regular expression no grammar holds, by what llguidance says of it."""
    if "look-around" in problem or "lookaround" in problem:
        return "has look-around, which cannot be held to by a grammar"
    if "backreference" in problem or "\\k" in problem:
        return "has a back-reference, which cannot be held to by a grammar"
    _, found, reason = problem.partition("error: ")
    return "cannot be held to by a grammar" + (f" ({' '.join(reason.split())})" if found else "")


def _keywords(node: Json) -> str:
    return ", ".join(sorted(node)) or "the schema"


# -- walking through schemas ------------------------------------------------------------------------------------------


def _at(node: Any, pointer: str) -> Any:
    """The part that a JSON pointer leads to; None if there is none."""
    for token in pointer.split("/")[1:]:
        key = unquote(token).replace("~1", "/").replace("~0", "~")
        if isinstance(node, dict):
            node = node.get(key)
        elif isinstance(node, list) and key.isdecimal() and int(key) < len(node):
            node = node[int(key)]
        else:
            return None
    return node


def _walk(root: Any) -> Iterator[tuple[str, Json]]:
    """Every object within, with a JSON pointer to it."""
    stack: list[tuple[str, Any]] = [("", root)]
    while stack:
        where, node = stack.pop()
        if isinstance(node, dict):
            yield where, node
            stack += [(f"{where}/{key.replace('~', '~0').replace('/', '~1')}", value) for key, value in node.items()]
        elif isinstance(node, list):
            stack += [(f"{where}/{index}", value) for index, value in enumerate(node)]
