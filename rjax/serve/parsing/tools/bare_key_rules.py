"""Grammar rules of objects with bare keys and strings between quotes that are not escaped."""

import json
import re
from collections.abc import Callable
from typing import Any

from rjax.serve.parsing.tools.parameter_rules import ANY_TEXT, branches, has_type, string_terminal
from rjax.serve.parsing.tools.parameter_schema import NOTES, ParameterSchema
from rjax.serve.protocol.requests import Tool
from rjax.structured.lark import SpecialTokens, quoted, regex_text

_KEY = r'[^\s<>{}\[\],:"]{1,256}'
_NUMBER = r"/-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?/"


class BareKeyRules:
    """Makes the rules of ``call_{i}``; see `ToolFormat.call_rules`.

    Args:
        tool, i, special_tokens, strict, literal: see `ToolFormat.call_rules`.
        name: the format's name.
        quote: text before and after a string.
        text: writes a JSON value in the format.
    """

    def __init__(
        self,
        tool: Tool,
        i: int,
        special_tokens: SpecialTokens,
        *,
        name: str,
        quote: str,
        text: Callable[[Any], str],
        strict: bool,
        literal: bool,
    ) -> None:
        self._function, self._i, self._special_tokens = tool.function.name, i, special_tokens
        self._quote, self._text = quote, text
        strict = strict or bool(tool.function.strict)
        self._schema = ParameterSchema(tool.function, name, strict=strict, literal=literal)
        self._rules: list[str] = []
        self._named: dict[int, str] = {}  # rules by the identity of their schemas
        self._kept: list[Any] = []  # those schemas, so that no other gets their identity

    def rules(self, head: str) -> list[str]:
        """The rules, of calls that begin with ``head`` and the function's name.

        Raises:
            InvalidRequestError: they cannot express the schema.
        """
        i, any_string = self._i, self._string(ANY_TEXT)
        self._rules += [
            f"any_{i}: {any_string} | ANY_NUMBER_{i} | ANY_WORD_{i} | any_list_{i} | any_dict_{i}",
            f"ANY_NUMBER_{i}: {_NUMBER}",
            f'ANY_WORD_{i}: "true" | "false" | "null" | "None"',
            f'any_list_{i}: "[" (any_{i} ("," any_{i})*)? "]"',
            f'any_dict_{i}: "{{" (any_pair_{i} ("," any_pair_{i})*)? "}}"',
            f'any_pair_{i}: ANY_KEY_{i} ":" any_{i}',
            f"ANY_KEY_{i}: /{_KEY}/",
        ]
        call = self._object(list(self._schema), self._schema.others)
        return [f"call_{i}: {quoted(head + self._function)} {call}", *self._rules]

    def _new(self) -> str:
        """The end of a new rule's name."""
        self._kept.append(None)
        return f"{len(self._kept)}_{self._i}"

    def _object(self, properties: list[tuple[str, Any, bool]], others: Any) -> str:
        """The rule of an object; its keys are sorted, others may stand between."""
        name = self._new()
        properties = sorted(properties, key=lambda one: one[0].lower())
        other = ""
        if others is not False:
            names = "|".join(regex_text(key) for key, _, _ in properties)
            excluded = f" & ~/({names})/" if names else ""
            self._rules.append(f"KEY_{name}: /{_KEY}/{excluded}")
            self._rules.append(f'other_{name}: KEY_{name} ":" {self._value(others)}')
            other = f"other_{name}"
        for j, (key, schema, required) in enumerate(properties):
            if not re.fullmatch(_KEY, key):
                raise self._schema.refusal(f"the property name {key[:100]!r}")
            pair = f"{quoted(key + ':')} {self._value(schema)}"
            for part, comma in (("first", ""), ("next", '"," ')):
                choices = [f"{comma}{pair} next_{name}_{j + 1}"]
                if other:
                    choices.append(f"{comma}{other} next_{name}_{j}")
                if not required:
                    choices.append(f"{part}_{name}_{j + 1}")
                self._rules.append(f"{part}_{name}_{j}: {' | '.join(choices)}")
        last = len(properties)
        more = f'("," {other})*' if other else '""'
        self._rules.append(f"next_{name}_{last}: {more}")
        self._rules.append(f"first_{name}_{last}: " + (f"({other} {more})?" if other else '""'))
        self._rules.append(f'object_{name}: "{{" first_{name}_0 "}}"')
        return f"object_{name}"

    def _value(self, schema: Any) -> str:
        """The rule of a value."""
        if schema is True:
            return f"any_{self._i}"
        known = self._named.get(id(schema))
        if known is not None:
            return known
        name = f"value_{self._new()}"
        self._named[id(schema)] = name
        self._kept.append(schema)
        choices = [self._branch(one) for one in branches(self._schema, schema)]
        self._rules.append(f"{name}: {' | '.join(choices)}")
        return name

    def _branch(self, schema: dict[str, Any]) -> str:
        """The expression of a value of one type."""
        kind, own = schema.get("type"), schema.keys() - NOTES
        if {"enum", "const"} & own and own <= {"enum", "const", "type"}:
            values = schema.get("enum", [schema.get("const")])
            texts = [self._literal(value) for value in values if has_type(value, kind)]
            if not texts:
                raise self._schema.refusal("a parameter without a possible value")
            return "(" + " | ".join(texts) + ")"
        match kind:
            case None if not own:
                return f"any_{self._i}"
            case "string":
                return self._string(string_terminal(self._schema, schema, own - {"type"}))
            case "null" if own == {"type"}:
                return '"None" | "null"'
            case "integer" | "number" | "boolean":
                return self._schema.document(schema)
            case "array":
                for keyword in sorted(own - {"type", "items"}):
                    raise self._schema.refusal(f"{keyword!r} of a list")
                item = self._value(schema.get("items", True))
                return f'"[" ({item} ("," {item})*)? "]"'
            case "object":
                known = {"type", "properties", "required", "additionalProperties"}
                for keyword in sorted(own - known):
                    raise self._schema.refusal(f"{keyword!r} of an object")
                others, named = (
                    schema.get("additionalProperties", True),
                    schema.get("properties", {}),
                )
                required = schema.get("required", [])
                found = [(key, one, key in required) for key, one in named.items()]
                found += [(key, others, True) for key in required if key not in named]
                return self._object(found, others)
            case _:
                raise self._schema.refusal(f"{', '.join(sorted(own))} without a type")

    def _literal(self, value: Any) -> str:
        """The expression of one value."""
        if self._quote in json.dumps(value, ensure_ascii=False).replace('\\"', '"'):
            raise self._schema.refusal(f"the value {value!r:.100}")
        return self._special_tokens.rule(self._text(value))

    def _string(self, terminal: str) -> str:
        """The expression of a string of a terminal, between quotes."""
        name, quote = self._new(), self._special_tokens.rule(self._quote)
        if self._special_tokens.is_special(self._quote):
            self._rules.append(f"TEXT_{name}: {terminal}")
            return f"{quote} TEXT_{name} {quote}"
        self._rules.append(f"ANY_{name}: {terminal}")
        self._rules.append(
            f"TEXT_{name}: ANY_{name} & ~/(.|\\n)*{regex_text(self._quote)}(.|\\n)*/"
        )
        self._rules.append(f"text_{name}[lazy]: TEXT_{name} {quote}")
        return f"{quote} text_{name}"
