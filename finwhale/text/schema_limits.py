"""Bounds on a JSON schema before anything compiles it, and whether it is plainly small.

The numbers are those that OpenAI publishes for structured outputs where it names one: 5,000
properties, 1,000 enum values, 120,000 characters of names and values. Nesting may be deeper than
its 10 levels. It refuses with the path of what is too large. A newcomer's mistake: reading "plain"
as valid; a plain schema may still be refused by the library that compiles it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

MAX_SCHEMA_CHARACTERS = 1_000_000
MAX_NAME_CHARACTERS = 120_000
MAX_PROPERTIES = 5_000
# Of one object: the library's work grows with their square.
MAX_OPTIONAL_PROPERTIES = 1_000
MAX_ENUM_VALUES = 1_000
MAX_LEVELS = 64
MAX_REFERENCES = 200
# Of the schema and of all that its references lead to, one behind the other. The libraries recurse
# over them with 2.6 kB of native stack a level. A thread may have 2 MB; beyond, the process dies.
MAX_CHAINED_LEVELS = 600
MAX_PATTERN_CHARACTERS = 10_000
# Of counts inside one another: a mask of (a{1000}){1000} takes 0.4 s and 200 MB.
MAX_NESTED_COUNT = 20_000

# Each asks for automata whose size has no bound in the schema's own.
_COSTLY = frozenset(
    {"pattern", "patternProperties", "propertyNames", "allOf", "not", "multipleOf", "oneOf"}
)
# What stands under these is a value and no schema.
_VALUES = frozenset({"enum", "const", "default", "examples", "example"})
_PARTS = frozenset({"allOf", "not", "if", "then", "else", "dependentSchemas", "dependentRequired"})
_OBJECT_SIZES = frozenset(
    {"additionalProperties", "patternProperties", "unevaluatedProperties", "minProperties"}
    | {"propertyNames"}
)
_TEXTS = frozenset({"title", "description", "$comment"})
# Under these stand names, each with a schema.
_TABLES = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
# An escape, a count (at most nine digits: more is refused by whoever compiles), any other letter.
_PATTERN_PARTS = re.compile(
    r"\\(?:[pPxuU]\{[^}]*\}|.)|\{(?P<least>[0-9]{1,9})(?:,(?P<most>[0-9]{0,9}))?\}|.", re.DOTALL
)
_PLAIN_CHARACTERS = 20_000
_PLAIN_REFERENCES = 50


class SchemaError(ValueError):
    """A schema over a limit; `path` leads to the place, "" for the whole."""

    def __init__(self, path: str, got: str, expected: str, *, kind: str = "schema") -> None:
        """Name the place, what is there, and what would do; `kind` is what the path begins in."""
        super().__init__(f"{kind}{path}: got {got}, expected {expected}")
        self.path = path


def check_shape(schema: Any, where: str = "schema") -> int:
    """Raise SchemaError for a schema that overruns a native stack; return its references.

    where  the path of the schema, for the error

    Whoever gives a schema of a client to a library checks this first, also only to show it.
    """
    references: set[str] = set()
    levels: dict[int, int] = {}
    for _, node in subschemas(schema, where):
        reference = node.get("$ref")
        if isinstance(reference, str):
            references.add(reference)
    if len(references) > MAX_REFERENCES:
        got = f"{len(references)} different references"
        raise SchemaError("", got, f"at most {MAX_REFERENCES}", kind=where)
    chained = _levels(schema, levels)
    for reference in references:
        chained += levels.get(id(_target(schema, reference)), 0)
    if chained > MAX_CHAINED_LEVELS:
        want = f"at most {MAX_CHAINED_LEVELS}"
        got = f"{chained} levels behind one another through references"
        raise SchemaError("", got, want, kind=where)
    return len(references)


def _levels(schema: Any, found: dict[int, int]) -> int:
    """Return the levels of a value, and put those of every object and list inside into `found`.

    Recursive over at most MAX_LEVELS, which `subschemas` has checked.
    """
    if not isinstance(schema, (dict, list)):
        return 0
    inner = schema.values() if isinstance(schema, dict) else schema
    found[id(schema)] = 1 + max((_levels(each, found) for each in inner), default=0)
    return found[id(schema)]


def _target(root: Any, reference: str) -> Any:
    """Return what a JSON pointer of the same document leads to; None where there is nothing."""
    found = root
    for step in reference.partition("#")[2].split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and step.isascii() and step.isdigit() and len(step) < 6:
            found = found[int(step)] if int(step) < len(found) else None
        else:
            found = found.get(step) if isinstance(found, dict) else None
    return found


def check_schema(schema: Any, text: str) -> bool:
    """Raise SchemaError for a schema over a limit; return whether it is plainly small.

    text  the same schema as JSON
    """
    if len(text) > MAX_SCHEMA_CHARACTERS:
        raise SchemaError("", f"{len(text)} characters", f"at most {MAX_SCHEMA_CHARACTERS}")
    num_references = check_shape(schema)
    num_properties = num_values = num_characters = 0
    is_plain = small_enough(text)
    for path, node in subschemas(schema):
        is_plain = is_plain and not _COSTLY & node.keys()
        for pattern in (node.get("pattern"), *_names(node.get("patternProperties"))):
            if isinstance(pattern, str):
                check_pattern(pattern, f"schema{path}.pattern")
        num_properties += _checked_properties(path, node)
        values = [*_list(node.get("enum")), *([node["const"]] if "const" in node else ())]
        num_values += len(values)
        num_characters += sum(len(str(value)) for value in values)
        for table in _TABLES & node.keys():
            if isinstance(node[table], dict):
                num_characters += sum(map(len, node[table]))
    for got, most, what in (
        (num_properties, MAX_PROPERTIES, "properties"),
        (num_values, MAX_ENUM_VALUES, "enum values"),
        (num_characters, MAX_NAME_CHARACTERS, "characters of names and values"),
    ):
        if got > most:
            raise SchemaError("", f"{got} {what}", f"at most {most}")
    return is_plain and num_references <= _PLAIN_REFERENCES


def small_enough(text: str) -> bool:
    """Return whether a grammar's text is short enough to be plain."""
    return len(text) <= _PLAIN_CHARACTERS


def check_pattern(pattern: str, where: str = "pattern") -> None:
    """Raise SchemaError for a pattern that is too long or repeats repetitions too often."""
    if len(pattern) > MAX_PATTERN_CHARACTERS:
        want = f"at most {MAX_PATTERN_CHARACTERS}"
        raise SchemaError("", f"{len(pattern)} characters", want, kind=where)
    count = _nested_count(pattern)
    if count > MAX_NESTED_COUNT:
        want = f"at most {MAX_NESTED_COUNT}"
        raise SchemaError("", f"{count} repetitions in repetitions", want, kind=where)


def _nested_count(pattern: str) -> int:
    """Return the largest product of the counts that stand around one another, 1 without any."""
    # The largest product inside each open group, and behind it that of the last closed one.
    inside, closed, most, is_class = [1], 1, 1, False
    for part in _PATTERN_PARTS.finditer(pattern):
        text = part.group()
        if is_class:
            is_class = text != "]"
        elif text == "[":
            is_class, closed = True, 1
        elif text == "(":
            inside.append(1)
            closed = 1
        elif text == ")" and len(inside) > 1:
            closed = inside.pop()
            inside[-1] = max(inside[-1], closed)
        elif part["least"] is not None:
            times = int(part["most"] or part["least"] or 0)
            product = closed * max(1, times)
            inside[-1] = max(inside[-1], product)
            if closed > 1:
                most = max(most, product)
            closed = product
        else:
            closed = 1
    return most


def _checked_properties(path: str, node: dict[str, Any]) -> int:
    properties = node.get("properties")
    if not isinstance(properties, dict):
        return 0
    needed = {name for name in _list(node.get("required")) if isinstance(name, str)}
    optional = len(properties) - len(needed & properties.keys())
    if optional > MAX_OPTIONAL_PROPERTIES:
        raise SchemaError(
            path,
            f"{optional} optional properties",
            f"at most {MAX_OPTIONAL_PROPERTIES} in one object; name more of them in required",
        )
    return len(properties)


def subschemas(schema: Any, where: str = "schema") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (path, object) for every object of a schema that may be a schema itself.

    Names of properties and definitions are no keywords, so their tables are entered and not told.
    Raises SchemaError for nesting deeper than MAX_LEVELS.
    """
    # Without recursion, since the depth comes from outside.
    left: list[tuple[str, Any, int, bool]] = [("", schema, 0, False)]
    while left:
        path, node, level, is_table = left.pop()
        if level > MAX_LEVELS:
            got = f"more than {MAX_LEVELS} levels"
            raise SchemaError("", got, "a flatter schema", kind=where)
        if isinstance(node, dict):
            if not is_table:
                yield path, node
            for name, value in reversed(node.items()):
                if is_table or name not in _VALUES:
                    tabled = not is_table and name in _TABLES
                    left.append((f"{path}.{name}", value, level + 1, tabled))
        elif isinstance(node, list):
            left += [
                (f"{path}[{i}]", value, level + 1, False)
                for i, value in reversed([*enumerate(node)])
            ]


def without_texts(schema: Any, *, is_table: bool = False) -> Any:
    """Return a copy without titles, descriptions and comments, which decide nothing.

    schema  one that `check_schema` has passed, so of few levels
    """
    if isinstance(schema, list):
        return [without_texts(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        name: value
        if not is_table and name in _VALUES
        else without_texts(value, is_table=not is_table and name in _TABLES)
        for name, value in schema.items()
        if is_table or name not in _TEXTS
    }


def closed(schema: Any) -> Any:
    """Return a copy whose objects have their declared properties alone, where nothing else is said.

    What is valid under it is valid under `schema`. An object that says nothing of
    `additionalProperties` would let a model go on with properties of its own to the limit. A
    schema that puts objects together (allOf, a reference with other keywords, properties beside
    anyOf) is returned as it is, since there one part declares what another one would forbid.

    schema  one that `check_schema` has passed, so of few levels
    """
    for _, node in subschemas(schema):
        keys = node.keys() - _TEXTS - _TABLES
        has_parts = bool(_PARTS & node.keys())
        if has_parts or (keys > {"$ref"}) or ("properties" in node and keys & {"anyOf", "oneOf"}):
            return schema
        if "oneOf" in node and not _are_told_apart(node["oneOf"]):
            return schema
    return _closed(schema)


def _are_told_apart(branches: Any) -> bool:
    """Return whether a text of a required property excludes all branches but one.

    Only then does a closed branch exclude as much as an open one: {"a": 1, "b": 2} may follow two
    open branches, and so none of `oneOf`, and one alone where the other is closed.
    """
    tables = [_texts_of(branch) for branch in _list(branches)]
    if not tables:
        return False
    return any(
        all(name in table for table in tables)
        and len(set().union(*(table[name] for table in tables)))
        == sum(len(table[name]) for table in tables)
        for name in tables[0]
    )


def _texts_of(branch: Any) -> dict[str, set[str]]:
    """Return {required property: its possible values} for those whose values are listed texts."""
    # An object alone: of other types the properties demand nothing.
    if not isinstance(branch, dict) or branch.get("type") != "object":
        return {}
    properties, found = branch.get("properties"), {}
    for name in _list(branch.get("required")):
        schema = properties.get(name) if isinstance(properties, dict) else None
        if isinstance(name, str) and isinstance(schema, dict):
            values = [schema["const"]] if "const" in schema else _list(schema.get("enum"))
            if values and all(isinstance(value, str) for value in values):
                found[name] = set(values)
    return found


def _closed(schema: Any, *, is_table: bool = False) -> Any:
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {
        name: value
        if not is_table and name in _VALUES
        else _closed(value, is_table=not is_table and name in _TABLES)
        for name, value in schema.items()
    }
    properties = schema.get("properties")
    is_open = not is_table and isinstance(properties, dict) and not _OBJECT_SIZES & schema.keys()
    if is_open and properties and set(map(str, _list(schema.get("required")))) <= properties.keys():
        found["additionalProperties"] = False
    return found


def _names(value: Any) -> list[str]:
    return list(value) if isinstance(value, dict) else []


def _list(value: Any) -> list:
    return value if isinstance(value, list) else []


def as_json(value: Any) -> str:
    """Return a schema as JSON text; raise SchemaError for what is none."""
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise SchemaError("", f"a value that is not JSON ({error})", "a JSON schema") from None
