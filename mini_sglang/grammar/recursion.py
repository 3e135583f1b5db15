"""What becomes of definitions that refer to themselves: which of them fit a finite value, and where a grammar loses it.

Takes schemas in the prepared form: each reference is to a definition in `$defs`, each keyword is one that a grammar
holds. Knows nothing of how they were written, and refuses none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any

from mini_sglang.sampling_params import Json

Schema = Json | bool
Definitions = Mapping[str, Schema]

_TYPES = frozenset(("null", "boolean", "integer", "number", "string", "array", "object"))
_LISTS = ("allOf", "anyOf", "prefixItems")
_MAPS = ("properties", "patternProperties")
_SINGLE = ("items", "additionalProperties")
_MAX_EXPANDED = 4  # definitions beside each other


def immediate_loops(definitions: Definitions) -> set[str]:
    """The definitions that refer to themselves with no property or item in between, and those that need them."""
    edges = {name: set(_references_at_once(schema)) for name, schema in definitions.items()}
    while free := [name for name, targets in edges.items() if not targets & edges.keys()]:
        for name in free:
            del edges[name]
    return set(edges)


# -- whether a value comes to an end ----------------------------------------------------------------------------------


def endless(definitions: Definitions) -> set[str]:
    """The definitions that need a value of themselves within each value, so that no finite one fits."""
    dead = set(definitions)
    before = -1
    while len(dead) != before:
        before = len(dead)
        for name in reversed(list(definitions)):
            if name in dead and has_an_end(definitions[name], definitions, dead):
                dead.remove(name)
    return dead


def has_an_end(
    schema: Schema, definitions: Definitions, dead: Set[str], beside: Sequence[Schema] = (), *, expand: bool = True
) -> bool:
    """Whether a finite value may fit, beside other schemas for the same value, if none fits the `dead` ones.

    It looks at nothing but recursion. Only with `expand`, so not in what is within, does it look at what references and
    alternatives together with the rest need: each part is looked at few times.
    """
    parts: list[Json] = []
    stack, seen = [schema, *beside], set[str]()
    while stack:
        part = stack.pop()
        if isinstance(part, bool):
            continue
        name = _name(part)
        if name in dead:
            return False
        if name is not None and expand and name not in seen and len(seen) < _MAX_EXPANDED:
            seen.add(name)
            stack.append(definitions[name])
        stack += part.get("allOf", ())
        parts.append(part)
    own = [
        some for part in parts if (some := {key: part[key] for key in part if key not in ("$ref", "allOf", "anyOf")})
    ]
    rest = own if expand else []
    for part in parts:
        branches = part.get("anyOf")
        if branches and not any(has_an_end(branch, definitions, dead, rest, expand=False) for branch in branches):
            return False
    if any("const" in part or "enum" in part for part in own):
        return True
    types = set(_TYPES).intersection(*(_listed(part["type"]) for part in own if "type" in part))

    def ends(said: Sequence[Schema]) -> bool:
        return not said or has_an_end(said[0], definitions, dead, said[1:], expand=False)

    return (
        not types
        or bool(types - {"object", "array"})
        or ("object" in types and all(ends(some) for some in _needed_properties(own)) and _has_a_name(own, ends))
        or ("array" in types and all(ends(some) for some in _needed_items(own)))
    )


def _needed_properties(parts: list[Json]) -> Iterator[list[Schema]]:
    """For each required property, what is said of it."""
    for name in {name for part in parts for name in part.get("required", ())}:
        said: list[Schema] = []
        for part in parts:
            if name in part.get("properties", ()):
                said.append(part["properties"][name])
            elif "additionalProperties" in part and "patternProperties" not in part:
                said.append(part["additionalProperties"])
        yield said


def _has_a_name(parts: list[Json], ends: Callable[[Sequence[Schema]], bool]) -> bool:
    """Whether an object that must have some property of any name can have one."""
    for part in parts:
        if part.get("minProperties") and "properties" not in part:
            others = [*part.get("patternProperties", {}).values(), part.get("additionalProperties", True)]
            if not any(other is not False and ends([other]) for other in others):
                return False
    return True


def _needed_items(parts: list[Json]) -> Iterator[list[Schema]]:
    """For each item that must be there, what is said of it; all behind the longest prefix are one."""
    longest = max((len(part.get("prefixItems", ())) for part in parts), default=0)
    for index in range(min(max((part.get("minItems", 0) for part in parts), default=0), longest + 1)):
        said: list[Schema] = []
        for part in parts:
            prefix = part.get("prefixItems", ())
            said += prefix[index : index + 1] or ([part["items"]] if "items" in part else [])
        yield said


def leave_out(schema: Schema, dead: Set[str]) -> None:
    """Write `false`, in place, for each reference to a dead definition within a schema."""

    def left(part: Schema) -> Schema:
        leave_out(part, dead)
        return False if isinstance(part, dict) and _name(part) in dead else part

    if isinstance(schema, bool):
        return
    for keyword in _LISTS:
        if keyword in schema:
            schema[keyword] = [left(part) for part in schema[keyword]]
    for keyword in _MAPS:
        if keyword in schema:
            schema[keyword] = {name: left(part) for name, part in schema[keyword].items()}
    for keyword in _SINGLE:
        if keyword in schema:
            schema[keyword] = left(schema[keyword])


# -- references that lead back, with more beside them -----------------------------------------------------------------


def entangled(definitions: Definitions) -> list[Json]:
    """The parts of definitions that refer back to where they are, and say more of the same value than that.

    What each says of types is dropped, in place, where what it refers to says it already.
    """
    if not any(_name(part) for schema in definitions.values() for part in _parts(schema)):
        return []
    edges = {
        name: {target for part in _parts(schema) if (target := _name(part))} for name, schema in definitions.items()
    }
    found = []
    for name, schema in definitions.items():
        for part in _parts(schema):
            if _says_more(part) and any(name in _reached(target, edges) for target in _references_at_once(part)):
                _drop_types(part, definitions)
                if _says_more(part):
                    found.append(part)
    return found


def keep_reference(part: Json) -> str:
    """Leave out, in place, what an entangled part says beside its reference. Returns the keywords left out."""
    kept: Json
    if "$ref" in part:
        kept = {"$ref": part["$ref"]}
    elif any(list(_references_at_once(each)) for each in part.get("allOf", ())):
        kept = next(each for each in part["allOf"] if list(_references_at_once(each)))
    else:
        kept = {"anyOf": part["anyOf"]}
    others = ", ".join(sorted(part.keys() - kept.keys())) or "allOf"
    kept = dict(kept)
    part.clear()
    part.update(kept)
    return others


def _says_more(part: Json) -> bool:
    return len(part) > 1 or len(part.get("allOf", ())) > 1


def _drop_types(part: Json, definitions: Definitions) -> None:
    if "type" in part:
        others = {key: value for key, value in part.items() if key != "type"}
        if types_of(others, definitions) <= _listed(part["type"]):
            del part["type"]
    if "allOf" in part and "$ref" not in part:
        typeless = [each for each in part["allOf"] if isinstance(each, dict) and each.keys() != {"type"}]
        if len(typeless) == 1 and types_of(typeless[0], definitions) <= types_of(part, definitions):
            part["allOf"] = typeless
    if part.keys() == {"allOf"} and len(part["allOf"]) == 1 and isinstance(part["allOf"][0], dict):
        part.update(part.pop("allOf")[0])
        if _says_more(part):
            _drop_types(part, definitions)


def types_of(schema: Schema, definitions: Definitions, known: dict[str, Set[str]] | None = None) -> Set[str]:
    """All types that a value of the schema may have; `known` are those of definitions."""
    known = {} if known is None else known
    if isinstance(schema, bool):
        return _TYPES if schema else set()
    types = _listed(schema["type"]) if "type" in schema else _TYPES
    if "const" in schema or "enum" in schema:
        types &= {_type(value) for value in schema.get("enum", [schema.get("const")])}
    name = _name(schema)
    if name is not None:
        if name not in known:
            known[name] = types_of(definitions[name], definitions, known)
        types &= known[name]
    for part in schema.get("allOf", ()):
        types &= types_of(part, definitions, known)
    if "anyOf" in schema:
        types &= set[str]().union(*(types_of(part, definitions, known) for part in schema["anyOf"]))
    return types


def _listed(types: str | list[str]) -> Set[str]:
    listed = {types} if isinstance(types, str) else set(types)
    return listed | {"integer"} if "number" in listed else listed


def _type(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "integer" if value == int(value) else "number"
    names = {type(None): "null", str: "string", list: "array", dict: "object"}
    return names[type(value)]


# -- walking ----------------------------------------------------------------------------------------------------------


def _name(part: Json) -> str | None:
    """The definition that a schema refers to itself."""
    return part["$ref"].rpartition("/")[2] if "$ref" in part else None


def _parts(schema: Schema) -> Iterator[Json]:
    """A schema and all schemas within, the outermost first."""
    stack: list[Schema] = [schema]
    while stack:
        part = stack.pop()
        if isinstance(part, dict):
            yield part
            for keyword in _LISTS:
                stack += part.get(keyword, ())
            for keyword in _MAPS:
                stack += part.get(keyword, {}).values()
            stack += [part[keyword] for keyword in _SINGLE if keyword in part]


def _references_at_once(schema: Schema) -> Iterator[str]:
    """The definitions that the same value must fit, or may have to."""
    if isinstance(schema, dict):
        if (name := _name(schema)) is not None:
            yield name
        for keyword in ("allOf", "anyOf"):
            for part in schema.get(keyword, ()):
                yield from _references_at_once(part)


def _reached(start: str, edges: Mapping[str, Set[str]]) -> set[str]:
    reached, stack = {start}, [start]
    while stack:
        new = edges[stack.pop()] - reached
        reached |= new
        stack += new
    return reached
