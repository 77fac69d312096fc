"""Values of parameters that a model writes without JSON's quotes, read by their schemas."""

import json
from typing import Any

from rjax.errors import InvalidRequestError
from rjax.serve.parsing.tools.literals import DECODER, literals_as_json
from rjax.structured.schemas import resolve_pointer

TYPES = frozenset(("string", "integer", "number", "boolean", "null", "array", "object"))
STRING = frozenset(("string",))
_MOST_REFERENCES = 16


def value_types(schema: Any, root: dict[str, Any], depth: int = _MOST_REFERENCES) -> frozenset[str]:
    """The JSON types of the values that a schema may allow.

    Args:
        schema: schema of a parameter.
        root: the document of the schema's references.
        depth: most nested references and combined schemas that are followed.
    """
    if not isinstance(schema, dict) or not depth:
        return TYPES

    def of(part: Any) -> frozenset[str]:
        return value_types(part, root, depth - 1)

    found = TYPES
    named = schema.get("type")
    if named is not None:
        found &= frozenset([named] if isinstance(named, str) else named)
    if "number" in found:
        found |= {"integer"}
    if isinstance(schema.get("enum"), list):
        found &= frozenset(map(json_type, schema["enum"]))
    if "const" in schema:
        found &= {json_type(schema["const"])}
    if "$ref" in schema:
        found &= of(resolve_pointer(schema["$ref"], root))
    for keyword in ("anyOf", "oneOf"):
        if isinstance(schema.get(keyword), list):
            found &= frozenset[str]().union(*map(of, schema[keyword]))
    if isinstance(schema.get("allOf"), list):
        found = found.intersection(*map(of, schema["allOf"]))
    return found


def json_type(value: Any) -> str:
    """The JSON type of a value."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "integer" if value.is_integer() else "number"
        case str():
            return "string"
        case list():
            return "array"
        case _:
            return "object"


def json_value(text: str, types: frozenset[str], *, python_words: bool = False) -> str:
    """A parameter's value as JSON.

    A value that may be a string is one, unless it is JSON of another type that it may have. Other
    values are JSON, or Python literals; a malformed one becomes a string, as in vLLM.

    Args:
        text: the value as the model wrote it.
        types: JSON types of the parameter, from `value_types`.
        python_words: whether True, False and None are values also where a string may be.
    """
    may_be_text = "string" in types
    if types != STRING:
        bare = text.strip()
        literals = not may_be_text or (python_words and bare in ("True", "False", "None"))
        for found in (bare, literals_as_json(bare)) if literals else (bare,):
            try:
                value, end = DECODER.raw_decode(found)
            except (ValueError, RecursionError):
                continue
            if end == len(found) and (not may_be_text or json_type(value) in types - STRING):
                return found
    return json.dumps(text, ensure_ascii=False)


def argument_values(name: str, arguments: str) -> dict[str, Any]:
    """The arguments of an earlier call by their names.

    Raises:
        InvalidRequestError: they are no JSON object.
    """
    try:
        given = json.loads(arguments)
    except (ValueError, RecursionError):
        given = None
    if not isinstance(given, dict):
        raise InvalidRequestError(
            f"messages: the arguments of a call of {name[:100]!r} are no JSON object"
        )
    return given
