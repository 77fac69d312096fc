"""Prepare JSON schemas for generation: close objects, remove unknown formats."""

import json
import urllib.parse
from collections.abc import Iterator
from typing import Any, no_type_check

# Formats that llguidance enforces. Others are annotations, as in the JSON Schema standard.
_FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
)
# Keywords that map names to schemas, and keywords with one schema or a list of schemas.
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_DIRECT = (
    *("items", "prefixItems", "additionalItems", "additionalProperties", "contains"),
    *("unevaluatedItems", "unevaluatedProperties", "propertyNames", "contentSchema"),
    *("allOf", "anyOf", "oneOf", "not", "if", "then", "else"),
)
# Closing an object below one of these keywords would change the meaning of the schema.
_OPAQUE = ("not", "if", "then", "else", "dependentSchemas", "contains", "propertyNames")
# Keywords, except ``allOf``, that apply further schemas to the same object.
_IN_PLACE = ("anyOf", "oneOf", "$ref", "if", "then", "else", "dependentSchemas")
_OWN = ("properties", "patternProperties", "required", "minProperties")


def generation_schema(schema: dict[str, Any], *, literal: bool = False) -> dict[str, Any]:
    """A copy of a schema for generation.

    JSON Schema allows any additional property if ``additionalProperties`` is missing, and a model
    could generate properties until ``max_tokens``. Objects with ``properties`` and without
    ``additionalProperties`` therefore get ``additionalProperties: false``. Two kinds of objects
    stay open: objects that several schemas describe together (members of ``allOf``, ``properties``
    beside ``$ref`` or ``anyOf``), because each schema would forbid the others' properties, and
    objects that require properties which they do not describe.

    Args:
        schema: valid JSON of bounded depth.
        literal: do not close objects.
    """
    root = json.loads(json.dumps(schema))
    parts = list(subschemas(root))
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
def subschemas(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A schema and all schemas inside it."""
    yield schema
    for keyword in (*_MAPS, *_DIRECT):
        for child in _children(schema, keyword):
            yield from subschemas(child)


@no_type_check  # called for each part of a large schema, where tests check every call
def _is_plain(schema: dict[str, Any], root: dict[str, Any]) -> bool:
    """Whether all references of the schema can be resolved."""
    if "$dynamicRef" in schema or ("$id" in schema and schema is not root):
        return False
    return "$ref" not in schema or resolve_pointer(schema["$ref"], root) is not None


@no_type_check  # called for each part of a large schema, where tests check every call
def resolve_pointer(pointer: object, root: dict[str, Any]) -> dict[str, Any] | None:
    """The schema that a JSON pointer of this document refers to; None if there is none."""
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
    """Number of schemas that describe the schema's object."""
    members = schema.get("allOf")
    return (
        any(name in schema for name in _OWN)
        + sum(name in schema for name in _IN_PLACE)
        + (len(members) if isinstance(members, list) else 0)
    )


@no_type_check  # called for each part of a large schema, where tests check every call
def _keep_open(schema: dict[str, Any], root: dict[str, Any], kept: set[int]) -> None:
    """Add a schema, its subschemas and everything they refer to, to ``kept``."""
    waiting = [schema]
    while waiting:
        for part in subschemas(waiting.pop()):
            if id(part) in kept:
                continue
            kept.add(id(part))
            target = resolve_pointer(part.get("$ref"), root)
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
