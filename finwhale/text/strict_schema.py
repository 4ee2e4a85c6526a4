"""The check of `strict: true`: OpenAI's subset of JSON schema, made explicit.

An object without `required` gets all its properties there, and `additionalProperties: false` is
put in, as the prompt's library does (spec/multimodal-serving.md section B.2). What the subset
refuses is refused with its path. A newcomer's mistake: leaving this to the prompt's library, whose
own subset is smaller: it knows no reference in a union and no format of a date.
Source: OpenAI's guide to structured outputs, "Supported schemas".
"""

from __future__ import annotations

from typing import Any

from finwhale.text.schema_limits import MAX_LEVELS

_REFUSED = (
    "allOf",
    "oneOf",
    "not",
    "if",
    "then",
    "else",
    "dependentRequired",
    "dependentSchemas",
    "patternProperties",
    "propertyNames",
    "unevaluatedProperties",
    "unevaluatedItems",
    "contains",
    "prefixItems",
    "minProperties",
    "maxProperties",
    "uniqueItems",
)
_FORMATS = (
    "date-time",
    "time",
    "date",
    "duration",
    "email",
    "hostname",
    "ipv4",
    "ipv6",
    "uuid",
)
_TYPES = ("string", "number", "boolean", "integer", "object", "array", "null")


class StrictSchemaError(ValueError):
    """A schema that `strict: true` does not admit; the text begins with the path."""

    def __init__(self, path: str, got: str, expected: str) -> None:
        """Name the place, what is there, and what would do."""
        super().__init__(f"{path}: strict: got {got}, expected {expected}")


def strict_schema(schema: Any, where: str) -> dict[str, Any]:
    """Return `schema` with `required` and `additionalProperties` written out.

    where  the path of the schema in the request, for errors

    Raises StrictSchemaError for what the subset does not have.
    """
    if not isinstance(schema, dict) or schema.get("type") != "object":
        got = repr(schema.get("type")) if isinstance(schema, dict) else type(schema).__name__
        raise StrictSchemaError(f"{where}.type", got, "'object' at the top of a strict schema")
    return _strict(schema, where, 0)


def _strict(node: Any, where: str, level: int) -> dict[str, Any]:
    if not isinstance(node, dict):
        raise StrictSchemaError(where, type(node).__name__, "a schema, an object")
    if level > MAX_LEVELS // 2:
        raise StrictSchemaError(where, "a deeper schema", f"at most {MAX_LEVELS // 2} levels")
    for name in _REFUSED:
        if name in node:
            raise StrictSchemaError(f"{where}.{name}", name, "a schema without it, or strict false")
    kind = node.get("type")
    kinds = kind if isinstance(kind, list) else [kind]
    if kind is None and not {"anyOf", "$ref", "enum", "const"} & node.keys():
        raise StrictSchemaError(where, "no type", "type, anyOf, $ref, enum or const")
    for each in kinds:
        if each is not None and each not in _TYPES:
            raise StrictSchemaError(f"{where}.type", repr(each)[:40], f"one of {', '.join(_TYPES)}")
    if "format" in node and node["format"] not in _FORMATS:
        got = repr(node["format"])[:40]
        raise StrictSchemaError(f"{where}.format", got, f"one of {', '.join(_FORMATS)}")
    found = dict(node)
    if "object" in kinds or "properties" in node:
        found |= _strict_object(node, where, level)
    if "array" in kinds and "items" not in node:
        raise StrictSchemaError(f"{where}.items", "nothing", "the schema of the items")
    if "items" in node:
        found["items"] = _strict(node["items"], f"{where}.items", level + 1)
    if "anyOf" in node:
        branches = node["anyOf"]
        if not isinstance(branches, list) or not branches:
            raise StrictSchemaError(f"{where}.anyOf", repr(branches)[:40], "a list of schemas")
        found["anyOf"] = [
            _strict(each, f"{where}.anyOf[{i}]", level + 1) for i, each in enumerate(branches)
        ]
    for table in ("$defs", "definitions"):
        if table in node:
            found[table] = _strict_table(node[table], f"{where}.{table}", level)
    return found


def _strict_object(node: dict[str, Any], where: str, level: int) -> dict[str, Any]:
    more = node.get("additionalProperties", False)
    if more is not False:
        raise StrictSchemaError(f"{where}.additionalProperties", repr(more)[:40], "false")
    properties = _strict_table(node.get("properties", {}), f"{where}.properties", level)
    required = node.get("required", list(properties))
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise StrictSchemaError(f"{where}.required", repr(required)[:40], "a list of names")
    if set(required) != set(properties):
        odd = sorted(set(required) ^ set(properties))[:3]
        raise StrictSchemaError(
            f"{where}.required",
            f"a list that differs from the properties in {odd}",
            "the names of all properties; make an optional one nullable",
        )
    return {"properties": properties, "additionalProperties": False, "required": required}


def _strict_table(table: Any, where: str, level: int) -> dict[str, Any]:
    if not isinstance(table, dict):
        raise StrictSchemaError(where, type(table).__name__, "an object of schemas")
    return {name: _strict(each, f"{where}.{name}", level + 1) for name, each in table.items()}
