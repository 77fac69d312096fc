"""The grammar of a function's arguments."""

import json

from rjax.serve.requests import Tool
from rjax.structured.lark import JSON_FORM
from rjax.structured.schemas import generation_schema


def arguments_rule(tool: Tool, *, strict: bool = True, literal: bool) -> str:
    """The JSON of a function's arguments.

    Each ``%json`` is a document of its own: the definitions of two functions never meet, and ``#``
    in a reference is the function's own schema.

    Args:
        tool: the function; without parameters it takes an empty object.
        strict: whether they match the schema also where the function does not ask for it; if not,
            they are any object.
        literal: as in `generation_schema`.
    """
    schema = tool.function.parameters
    if not strict and not tool.function.strict:
        schema = {"type": "object"}
    elif schema is None:
        schema = {"type": "object", "properties": {}, "additionalProperties": False}
    found = generation_schema(schema, literal=literal) | {"x-guidance": JSON_FORM}
    return f"%json {json.dumps(found)}"
