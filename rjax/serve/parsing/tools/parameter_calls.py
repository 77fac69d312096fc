"""Formats that write each parameter of a call between tags of its own."""

import dataclasses
import json
import re
from collections.abc import Callable
from typing import Any

from rjax.serve.parsing.tools.base import NAME, Functions, ToolFormat
from rjax.serve.parsing.tools.markers import partial_marker
from rjax.serve.parsing.tools.parameter_rules import KEY, ParameterRules, ParameterTexts
from rjax.serve.parsing.tools.parser import MAX_HEAD, ToolCallParser
from rjax.serve.parsing.tools.values import STRING, TYPES, argument_values, json_value, value_types
from rjax.serve.protocol.requests import Tool
from rjax.structured.lark import SpecialTokens

_KEY = KEY.replace("[^", r"[^\ud800-\udfff")  # no signs either
_FUNCTION = r"([a-zA-Z0-9_.-]+)"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParameterFormat(ParameterTexts, ToolFormat):
    """A call is the function's name and its parameters, whose values are typed by their schemas.

    Strings are written as they are, other values as JSON.
    """

    def parser(self, functions: Functions, sign: Callable[[str], str]) -> ToolCallParser:
        """See `ToolFormat`."""
        return ParameterCallParser(self, functions, sign)

    def one_call(self, name: str, arguments: str) -> str:
        """See `ToolFormat`."""
        values = "".join(
            f"{self.key_begin}{key}{self.key_end}{self.padding}{self._value(value)}"
            f"{self.padding}{self.value_end}{self.gap}"
            for key, value in argument_values(name, arguments).items()
        )
        return f"{self.head.replace(NAME, name)}{values}{self.tail}"

    def _value(self, value: Any) -> str:
        if isinstance(value, str):
            return value
        if self.python_words and (value is None or isinstance(value, bool)):
            return str(value)
        return json.dumps(value, ensure_ascii=False)

    def call_rules(
        self, i: int, tool: Tool, special_tokens: SpecialTokens, *, strict: bool, literal: bool
    ) -> list[str]:
        """See `ToolFormat`."""
        made = ParameterRules(self, i, tool, special_tokens, strict=strict, literal=literal)
        return made.rules()

    @property
    def example(self) -> str:
        """See `ToolFormat`."""
        return self.call_text("function-name", '{"argument-name": "value"}')


class ParameterCallParser(ToolCallParser):
    """Reports a call when its function's name is known, and its arguments one by one as JSON;
    strings are streamed. Text between parameters is ignored, as in vLLM.

    Args:
        fmt: tool-call format of the model.
        functions: functions that may be called.
        sign: replaces tags in a text by their signs.
    """

    def __init__(
        self, fmt: ParameterFormat, functions: Functions, sign: Callable[[str], str] = str
    ) -> None:
        super().__init__(fmt, functions, sign)

        def spaced(text: str) -> str:
            return r"\s{0,16}".join(map(re.escape, re.split(r"\s+", sign(text))))

        self._functions = functions
        before, _, after = fmt.head.partition(NAME)
        begin, end = spaced(fmt.key_begin), re.escape(self._end)
        # A name without a tag of its own ends with its line, the call, or at the first parameter.
        name_end = spaced(after) if after.strip() else rf"[ \t]*(?=\n|{begin}|{end})"
        self._head = re.compile(rf"\s*{spaced(before)}{_FUNCTION}{name_end}")
        call_end = re.escape(sign(fmt.tail)) if fmt.tail else f"(?={end})"
        self._part = re.compile(
            f"{begin}({_KEY}){spaced(fmt.key_end.rstrip())}|{call_end}|(?={end})"
        )
        self._value_end = sign(fmt.value_end)
        self._padding, self._python_words = fmt.padding, fmt.python_words
        self._searched = 0  # characters of the buffer that do not contain the value's end
        self._parameters: dict[str, Any] = {}  # schema of the call's parameters
        self._types = TYPES  # of the value
        self._separator = ""

    def _call(self, ended: bool) -> bool:
        """State: a possible call."""
        head = self._head.match(self._buffer, 0, MAX_HEAD)
        if head is None:
            if ended or len(self._buffer) >= MAX_HEAD or self._end in self._buffer:
                return self._reject()
            return False
        if not self._may_call(head.group(1)):
            return self._reject()
        self._emit(head.group(1), "")
        self._parameters = self._functions[head.group(1)] or {}
        self._buffer = self._buffer[head.end() :]
        self._separator, self._state = "{", self._between_parameters
        return True

    def _between_parameters(self, ended: bool) -> bool:
        """State: before a parameter or the end of the call."""
        part = self._part.search(self._buffer)
        if part is None:
            self._buffer = self._buffer[-MAX_HEAD:]
            return False
        self._buffer = self._buffer[part.end() :]
        key = part.group(1)
        if key is None:
            self._emit_arguments("{}" if self._separator == "{" else "}")
            self._state = self._closing_tag
            return True
        named = self._parameters.get("properties")
        schema = named.get(key.strip()) if isinstance(named, dict) else None
        self._types = value_types(schema, self._parameters)
        self._emit_arguments(f"{self._separator}{json.dumps(key.strip(), ensure_ascii=False)}: ")
        self._separator, self._searched = ", ", 0
        self._state = self._start_of_string if self._types == STRING else self._value
        return True

    def _value(self, ended: bool) -> bool:
        """State: a value that is no string, up to its end."""
        at = self._buffer.find(self._value_end, self._searched)
        if at < 0:
            self._searched = max(0, len(self._buffer) - len(self._value_end) + 1)
            return False
        text = self._buffer[:at].removeprefix(self._padding).removesuffix(self._padding)
        value = json_value(text, self._types, python_words=self._python_words)
        self._emit_arguments(value)
        return self._end_value(at)

    def _start_of_string(self, ended: bool) -> bool:
        """State: the white space before a string."""
        if not self._buffer:
            return False
        self._buffer = self._buffer.removeprefix(self._padding)
        self._emit_arguments('"')
        self._state = self._string
        return True

    def _string(self, ended: bool) -> bool:
        """State: a string."""
        at = self._buffer.find(self._value_end)
        if at >= 0:
            self._emit_text(self._buffer[:at].removesuffix(self._padding))
            self._emit_arguments('"')
            return self._end_value(at)
        ends = {self._value_end, self._padding + self._value_end}
        held = 0 if ended else partial_marker(self._buffer, *ends)
        size = len(self._buffer) - held
        self._emit_text(self._buffer[:size])
        self._buffer = self._buffer[size:]
        return False

    def _emit_text(self, text: str) -> None:
        self._emit_arguments(json.dumps(text, ensure_ascii=False)[1:-1])

    def _end_value(self, at: int) -> bool:
        self._buffer = self._buffer[at + len(self._value_end) :]
        self._state = self._between_parameters
        return True
