"""JSON schemas as they are generated from: objects closed, unknown formats left out."""

import json
import urllib.parse
from collections.abc import Iterator
from typing import Any, no_type_check

# Formats that llguidance enforces. Others are annotations, as the JSON Schema standard has it.
_FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
)
# Keywords that hold schemas by name, and those that hold one schema or a list of them.
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_DIRECT = (
    *("items", "prefixItems", "additionalItems", "additionalProperties", "contains"),
    *("unevaluatedItems", "unevaluatedProperties", "propertyNames", "contentSchema"),
    *("allOf", "anyOf", "oneOf", "not", "if", "then", "else"),
)
# Closing an object in one of these would change what else is allowed.
_OPAQUE = ("not", "if", "then", "else", "dependentSchemas", "contains", "propertyNames")
# Keywords that constrain the very object that their schema constrains, ``allOf`` aside.
_IN_PLACE = ("anyOf", "oneOf", "$ref", "if", "then", "else", "dependentSchemas")
_OWN = ("properties", "patternProperties", "required", "minProperties")


def generation_schema(schema: dict[str, Any], *, literal: bool = False) -> dict[str, Any]:
    """A copy of a schema to generate from.

    JSON Schema allows any further property where ``additionalProperties`` is missing, and a model
    could go on with them until its tokens are used up. So an object with ``properties`` and
    without ``additionalProperties`` gets ``additionalProperties: false``. An object that several
    schemas describe together (members of ``allOf``, ``properties`` beside ``$ref`` or ``anyOf``)
    stays open, since each would forbid the properties of the others. So does an object that
    requires properties which it does not describe.

    Args:
        schema: valid JSON of bounded depth.
        literal: leave objects as they are.
    """
    root = json.loads(json.dumps(schema))
    parts = list(_subschemas(root))
    for part in parts:
        if isinstance(part.get("format"), str) and part["format"] not in _FORMATS:
            del part["format"]
    if literal or not all(_is_plain(part, root) for part in parts):
        return root
    kept_open: set[int] = set()
    for part in parts:
        if _num_descriptions(part) > 1:
            _keep_open(part, root, kept_open)
        for name in _OPAQUE:
            for child in _children(part, name):
                _keep_open(child, root, kept_open)
    for part in parts:
        if id(part) not in kept_open and _is_closable(part):
            part["additionalProperties"] = False
    return root


@no_type_check  # called for each part of a large schema, where tests check every call
def _children(schema: dict[str, Any], keyword: str) -> Iterator[dict[str, Any]]:
    """The schemas under one keyword."""
    value = schema.get(keyword)
    if keyword in _MAPS:
        held = list(value.values()) if isinstance(value, dict) else []
    else:
        held = value if isinstance(value, list) else [value]
    return (child for child in held if isinstance(child, dict))


@no_type_check  # called for each part of a large schema, where tests check every call
def _subschemas(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A schema and all schemas inside it."""
    yield schema
    for keyword in (*_MAPS, *_DIRECT):
        for child in _children(schema, keyword):
            yield from _subschemas(child)


@no_type_check  # called for each part of a large schema, where tests check every call
def _is_plain(schema: dict[str, Any], root: dict[str, Any]) -> bool:
    """Whether it is known what the schema refers to."""
    if "$dynamicRef" in schema or ("$id" in schema and schema is not root):
        return False
    return "$ref" not in schema or _target(schema["$ref"], root) is not None


@no_type_check  # called for each part of a large schema, where tests check every call
def _target(pointer: object, root: dict[str, Any]) -> dict[str, Any] | None:
    """The schema that a JSON pointer of this document names, if it is one."""
    if not isinstance(pointer, str) or not (pointer == "#" or pointer.startswith("#/")):
        return None
    found: Any = root
    for step in pointer.split("/")[1:]:
        name = urllib.parse.unquote(step).replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict):
            found = found.get(name)
        elif isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        else:
            return None
    return found if isinstance(found, dict) else None


@no_type_check  # called for each part of a large schema, where tests check every call
def _num_descriptions(schema: dict[str, Any]) -> int:
    """In how many places the schema says what its object holds."""
    members = schema.get("allOf")
    return (
        any(name in schema for name in _OWN)
        + sum(name in schema for name in _IN_PLACE)
        + (len(members) if isinstance(members, list) else 0)
    )


@no_type_check  # called for each part of a large schema, where tests check every call
def _keep_open(schema: dict[str, Any], root: dict[str, Any], kept: set[int]) -> None:
    """Note a schema, all inside it and all that these refer to."""
    waiting = [schema]
    while waiting:
        for part in _subschemas(waiting.pop()):
            if id(part) in kept:
                continue
            kept.add(id(part))
            target = _target(part.get("$ref"), root)
            if target is not None and id(target) not in kept:
                waiting.append(target)


@no_type_check  # called for each part of a large schema, where tests check every call
def _is_closable(schema: dict[str, Any]) -> bool:
    own = schema.get("properties")
    if not isinstance(own, dict):
        return False
    if "additionalProperties" in schema or "unevaluatedProperties" in schema:
        return False
    required, least = schema.get("required", []), schema.get("minProperties", 0)
    return (
        isinstance(required, list)
        and all(isinstance(name, str) and name in own for name in required)
        and isinstance(least, int | float)
        and least <= len(own)
    )
