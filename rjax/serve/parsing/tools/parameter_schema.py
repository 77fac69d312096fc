"""The schema of a function's parameters, for formats that write each parameter on its own."""

import json
from collections.abc import Iterator
from typing import Any

from rjax.errors import InvalidRequestError
from rjax.serve.protocol.requests import Function
from rjax.structured.lark import JSON_FORM
from rjax.structured.schemas import generation_schema, resolve_pointer, subschemas

# Keywords that constrain no value.
NOTES = frozenset(
    (
        *("title", "description", "default", "examples", "example", "deprecated", "strict"),
        *("readOnly", "writeOnly", "$schema", "$comment", "$defs", "definitions", "$id"),
        *("discriminator", "contentEncoding", "contentMediaType"),
    )
)
_OF_OBJECTS = frozenset(("type", "properties", "required", "additionalProperties"))


class ParameterSchema:
    """The parameters of a function, in the order of its schema.

    Args:
        function: the function.
        fmt: name of the tool-call format, for messages.
        strict: enforce the schema; otherwise any arguments are allowed.
        literal: do not close objects; see `generation_schema`.

    Attributes:
        others: schema of further parameters; True allows any, False none.

    Raises:
        InvalidRequestError: the schema constrains the parameters together.
    """

    def __init__(self, function: Function, fmt: str, *, strict: bool, literal: bool) -> None:
        self._name, self._format = function.name, fmt
        given = function.parameters
        if given is None:
            given = {"additionalProperties": False}
        self._root = generation_schema(given, literal=literal) if strict else {}
        schema, refers = self.followed(self._root)
        while refers:
            schema, refers = self.followed(schema)
        for keyword in sorted(schema.keys() - _OF_OBJECTS - NOTES):
            raise self.refusal(f"{keyword!r} beside its properties")
        self.others: Any = schema.get("additionalProperties", True)
        self._named = schema.get("properties", {})
        self._required = schema.get("required", [])

    def __iter__(self) -> Iterator[tuple[str, Any, bool]]:
        """Name, schema and whether it is required, of each parameter that the schema names."""
        for name, schema in self._named.items():
            yield name, schema, name in self._required
        for name in self._required:
            if name not in self._named:
                yield name, self.others, True

    def refusal(self, what: str) -> InvalidRequestError:
        """The error of a schema that the format cannot enforce."""
        return InvalidRequestError(
            f"tools: the schema of {self._name} has {what}, which the model's format of tool calls "
            f"({self._format}) cannot enforce; change the schema, or let the model call freely"
        )

    def followed(self, schema: dict[str, Any]) -> tuple[dict[str, Any], bool]:
        """The target of a schema that only refers to another, and whether it is one."""
        own = schema.keys() - NOTES
        target = None
        if own == {"$ref"}:
            target = resolve_pointer(schema["$ref"], self._root)
        elif own == {"allOf"} and len(schema["allOf"]) == 1:
            target = schema["allOf"][0]
        if not isinstance(target, dict) or target is schema:
            return schema, False
        return target, True

    def document(self, schema: dict[str, Any]) -> str:
        """The Lark expression of JSON that matches a part of this schema."""
        if any("$ref" in part for part in subschemas(schema)):
            schema, root = json.loads(json.dumps([schema, self._root]))
            for part in (*subschemas(schema), *subschemas(root)):
                if isinstance(part.get("$ref"), str) and part["$ref"].startswith("#"):
                    part["$ref"] = f"#/$defs/root{part['$ref'][1:]}"
            schema["$defs"] = {"root": root}
        return f"%json {json.dumps(schema | {'x-guidance': JSON_FORM})}"
