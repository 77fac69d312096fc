"""The grammar rule of a function's arguments."""

import json

from rjax.serve.protocol.requests import Tool
from rjax.structured.lark import JSON_FORM
from rjax.structured.schemas import generation_schema


def arguments_rule(tool: Tool, *, strict: bool = True, literal: bool) -> str:
    """The rule of a function's arguments as JSON.

    Each ``%json`` is a separate document: the definitions of two functions do not conflict, and
    ``#`` in a reference is the function's own schema.

    Args:
        tool: the function; without parameters its arguments are an empty object.
        strict: enforce the schema even if the function is not ``strict``; otherwise the arguments
            of a function that is not strict are any object.
        literal: do not close objects; see `generation_schema`.
    """
    schema = tool.function.parameters
    if not strict and not tool.function.strict:
        schema = {"type": "object"}
    elif schema is None:
        schema = {"type": "object", "properties": {}, "additionalProperties": False}
    found = generation_schema(schema, literal=literal) | {"x-guidance": JSON_FORM}
    return f"%json {json.dumps(found)}"
