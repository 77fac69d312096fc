"""Llama 4, ToolACE and others: a list of Python calls, at the start of the output."""

import dataclasses
import json
import re
from collections.abc import Callable, Container
from typing import Any

from rjax.serve.parsing.tools.base import Functions, ToolFormat
from rjax.serve.parsing.tools.brackets import BracketScanner
from rjax.serve.parsing.tools.literals import DECODER, literals_as_json
from rjax.serve.parsing.tools.parameter_schema import NOTES, ParameterSchema
from rjax.serve.parsing.tools.parser import ToolCallParser, WholeCallParser
from rjax.serve.parsing.tools.values import argument_values
from rjax.serve.protocol.requests import Tool
from rjax.structured.lark import SpecialTokens, quoted

_PYTHON_TAG = "<|python_tag|>"
_PYTHON_START, _PYTHON_END = "<|python_start|>", "<|python_end|>"
_HEAD = re.compile(r"\s*([a-zA-Z0-9_.-]+)\s*\(")
_HEAD_BEGIN = re.compile(r"\s*[a-zA-Z0-9_.-]*\s*")
_KEY = r"[a-zA-Z_][a-zA-Z0-9_]{0,255}"
_KEYWORD = re.compile(rf"\s*({_KEY})\s*=\s*")
_COMMA = re.compile(r"\s*(,|$)")
_WORDS = {"true": "True", "false": "False", "null": "None"}
_ESCAPED = r"""\\(["'\\bfnrt]|u[0-9a-fA-F]{4})"""
_LITERAL_RULES = [
    "literal: STRING | NUMBER | WORD | list | dict",
    rf"""STRING: /"({_ESCAPED}|[^"\\\x00-\x1f])*"/ | /'({_ESCAPED}|[^'\\\x00-\x1f])*'/""",
    r"NUMBER: /-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?/",
    'WORD: "True" | "False" | "None" | "true" | "false" | "null"',
    'list: "[" (literal (", " literal)*)? "]"',
    'dict: "{" (pair (", " pair)*)? "}"',
    'pair: STRING ": " literal',
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PythonicFormat(ToolFormat):
    """Calls with keyword arguments, whose values are Python literals or JSON.

    Attributes:
        trail: tag that may follow the list.
    """

    trail: str = ""

    def parser(self, functions: Functions, sign: Callable[[str], str]) -> ToolCallParser:
        """See `ToolFormat`."""
        return PythonicCallParser(self, functions, sign)

    def one_call(self, name: str, arguments: str) -> str:
        """See `ToolFormat`."""
        given = argument_values(name, arguments)
        texts = {key: json.dumps(value, ensure_ascii=False) for key, value in given.items()}
        return f"{name}({', '.join(f'{k}={_WORDS.get(text, text)}' for k, text in texts.items())})"

    @property
    def example(self) -> str:
        """See `ToolFormat`."""
        return self.call_text("function_name", '{"argument_name": "value"}')

    def shared_rules(self) -> list[str]:
        """See `ToolFormat`."""
        return _LITERAL_RULES

    def call_rules(
        self, i: int, tool: Tool, special_tokens: SpecialTokens, *, strict: bool, literal: bool
    ) -> list[str]:
        """See `ToolFormat`."""
        strict = strict or bool(tool.function.strict)
        schema = ParameterSchema(tool.function, self.name, strict=strict, literal=literal)
        named = list(schema)
        rules = [f"call_{i}: {quoted(tool.function.name + '(')} first_{i}_0 {quoted(')')}"]
        for j, (key, of_value, required) in enumerate(named):
            if not re.fullmatch(_KEY, key):
                raise schema.refusal(f"the property name {key[:100]!r}")
            skip = ("", "") if required else (f" | first_{i}_{j + 1}", f" | next_{i}_{j + 1}")
            value = _value_rule(schema, of_value)
            rules += [
                f"first_{i}_{j}: argument_{i}_{j} next_{i}_{j + 1}{skip[0]}",
                f'next_{i}_{j}: ", " argument_{i}_{j} next_{i}_{j + 1}{skip[1]}',
                f"argument_{i}_{j}: {quoted(key + '=')} value_{i}_{j}",
                f"value_{i}_{j}: {value}",
            ]
        last = len(named)
        if schema.others is False:
            return [*rules, f'first_{i}_{last}: ""', f'next_{i}_{last}: ""']
        names = "|".join(key for key, _, _ in named)
        return [
            *rules,
            f'first_{i}_{last}: (other_{i} (", " other_{i})*)?',
            f'next_{i}_{last}: (", " other_{i})*',
            f"KEY_{i}: /{_KEY}/" + (f" & ~/({names})/" if names else ""),
            f'other_{i}: KEY_{i} "=" value_{i}_other',
            f"value_{i}_other: {_value_rule(schema, schema.others)}",
        ]


def _value_rule(schema: ParameterSchema, of_value: Any) -> str:
    """The Lark expression of a value: JSON, or one of Python's words."""
    if of_value is False:
        raise schema.refusal("a parameter without a possible value")
    if of_value is True or not of_value.keys() - NOTES:
        return "literal"
    return " | ".join([schema.document(of_value), *map(quoted, _words(of_value))])


def _words(schema: Any) -> list[str]:
    """Python's words among the values of a schema, where only its type decides."""
    if not isinstance(schema, dict):
        return []
    own = schema.keys() - NOTES
    if own == {"anyOf"}:
        return list(dict.fromkeys(word for part in schema["anyOf"] for word in _words(part)))
    if own in ({"enum"}, {"const"}):
        values = schema.get("enum", [schema.get("const")])
        return [str(value) for value in values if value is None or isinstance(value, bool)]
    if {"enum", "const", "not", "if", "allOf", "anyOf", "oneOf", "$ref"} & own:
        return []
    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    return ["True", "False"] * ("boolean" in kinds) + ["None"] * ("null" in kinds)


class PythonicCallParser(WholeCallParser):
    """Finds the end of a call by its brackets, as Python has them.

    Args:
        fmt: tool-call format of the model.
        names: functions that may be called.
        sign: replaces tags in a text by their signs.
    """

    head, head_begin = _HEAD, _HEAD_BEGIN

    def __init__(
        self, fmt: PythonicFormat, names: Container[str], sign: Callable[[str], str] = str
    ) -> None:
        super().__init__(fmt, names, sign, separators=",")
        self._trail = sign(fmt.trail)
        self._searched = 0  # characters of the buffer that do not contain the call's end
        self._scanner = self._new_scanner()

    def _open(self, at: int, lead: str) -> bool:
        self._searched, self._scanner = 0, self._new_scanner()
        return super()._open(at, lead)

    def _closing(self, start: int) -> int | None:
        """See `WholeCallParser`."""
        at = max(start, self._searched)
        stop = self._scanner.closing(self._buffer[at:], 0)
        if stop is None:
            self._searched = len(self._buffer)
            return None
        return at + stop

    def _arguments(self, text: str) -> str | None:
        """See `WholeCallParser`."""
        return _arguments(text[1:-1])

    def _after(self, ended: bool) -> bool:
        """State: white space and a tag after the list."""
        text = self._buffer.lstrip()
        if self._trail and text.startswith(self._trail):
            self._buffer, self._trail = text[len(self._trail) :], ""
            return True
        if self._trail.startswith(text) and not ended:
            return False
        return super()._after(ended)

    @staticmethod
    def _new_scanner() -> BracketScanner:
        return BracketScanner(brackets=("([{", ")]}"), quotes="\"'")


def _arguments(text: str) -> str | None:
    """Keyword arguments as JSON; None if they are no literals."""
    text = literals_as_json(text)
    found: dict[str, str] = {}
    at = 0
    while text[at:].strip():
        key = _KEYWORD.match(text, at)
        if key is None:
            return None
        try:
            _, end = DECODER.raw_decode(text, key.end())
        except (ValueError, RecursionError):
            return None
        found[key.group(1)] = text[key.end() : end]
        comma = _COMMA.match(text, end)
        if comma is None:
            return None
        at = comma.end()
    return "{" + ", ".join(f'"{key}": {value}' for key, value in found.items()) + "}"


_PYTHONIC = PythonicFormat(
    name="pythonic",
    markers=(r"\[func_name1\(",),
    absent=(r"<\|header_start\|>",),
    begin="[",
    end="]",
    joint=", ",
    opening=("[",),
    last="]",
    tags=(_PYTHON_TAG,),
    anywhere=False,
    first="[",
    lead=_PYTHON_TAG,
)
FORMATS = (
    _PYTHONIC,
    dataclasses.replace(
        _PYTHONIC,
        name="llama4_pythonic",
        variant_of="pythonic",
        markers=(*_PYTHONIC.markers, *_PYTHONIC.absent),
        absent=(),
        tags=(_PYTHON_START, _PYTHON_END),
        lead=_PYTHON_START,
        trail=_PYTHON_END,
    ),
)
