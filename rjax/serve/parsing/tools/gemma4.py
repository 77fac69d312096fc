"""Gemma 4: a name and arguments with bare keys, and strings between tokens of their own."""

import dataclasses
import json
import re
from collections.abc import Callable, Container
from typing import Any

from rjax.serve.parsing.tools.bare_key_rules import BareKeyRules
from rjax.serve.parsing.tools.base import Functions, ToolFormat
from rjax.serve.parsing.tools.literals import DECODER
from rjax.serve.parsing.tools.parser import ToolCallParser, WholeCallParser
from rjax.serve.parsing.tools.values import argument_values
from rjax.serve.protocol.requests import Tool
from rjax.structured.lark import SpecialTokens

_CALL, _CALL_END, _QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
_HEAD = re.compile(r"\s*call:\s*([a-zA-Z0-9_.-]+)\s*\{")
_HEAD_BEGIN = re.compile(r"\s*(c(a(l(l(:\s*[a-zA-Z0-9_.-]*\s*)?)?)?)?)?")
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_WORDS = {word: word.lower() for word in ("true", "false", "null", "True", "False")}
_WORDS["None"] = "null"


@dataclasses.dataclass(frozen=True, kw_only=True)
class BareKeyFormat(ToolFormat):
    """A call is "call:", the function's name and an object without JSON's quotes: keys are bare and
    sorted, as the template writes them.

    Attributes:
        quote: text before and after a string, which is not escaped.
    """

    quote: str

    def parser(self, functions: Functions, sign: Callable[[str], str]) -> ToolCallParser:
        """See `ToolFormat`."""
        return BareKeyCallParser(self, functions, sign)

    def one_call(self, name: str, arguments: str) -> str:
        """See `ToolFormat`."""
        return f"call:{name}{self.value_text(argument_values(name, arguments))}"

    def value_text(self, value: Any) -> str:
        """A JSON value as the template writes it."""
        match value:
            case str():
                return f"{self.quote}{value}{self.quote}"
            case dict():
                pairs = sorted(value.items(), key=lambda pair: pair[0].lower())
                return f"{{{','.join(f'{key}:{self.value_text(one)}' for key, one in pairs)}}}"
            case list():
                return f"[{','.join(map(self.value_text, value))}]"
            case None:
                return "None"
            case _:
                return json.dumps(value)

    def call_rules(
        self, i: int, tool: Tool, special_tokens: SpecialTokens, *, strict: bool, literal: bool
    ) -> list[str]:
        """See `ToolFormat`."""
        made = BareKeyRules(
            tool,
            i,
            special_tokens,
            name=self.name,
            quote=self.quote,
            text=self.value_text,
            strict=strict,
            literal=literal,
        )
        return made.rules("call:")

    @property
    def example(self) -> str:
        """See `ToolFormat`."""
        return self.call_text("function_name", '{"argument_name": "value"}')


class BareKeyCallParser(WholeCallParser):
    """Finds the end of a call by its brackets outside of strings.

    Args:
        fmt: tool-call format of the model.
        names: functions that may be called.
        sign: replaces tags in a text by their signs.
    """

    head, head_begin = _HEAD, _HEAD_BEGIN

    def __init__(
        self, fmt: BareKeyFormat, names: Container[str], sign: Callable[[str], str] = str
    ) -> None:
        super().__init__(fmt, names, sign)
        self._quote = sign(fmt.quote)
        quote = re.escape(self._quote)
        self._marks = re.compile(rf"{quote}|[{{}}\[\]]")
        self._parts = re.compile(
            rf"{quote}(?P<string>.*?){quote}|(?P<mark>[{{}}\[\],:])|(?P<bare>(?:(?!{quote})[^{{}}\[\],:])+)",
            re.DOTALL,
        )
        self._restart()

    def _restart(self) -> None:
        self._searched = self._depth = 0  # characters without the call's end; open brackets there
        self._in_string = False

    def _open(self, at: int, lead: str) -> bool:
        self._restart()
        return super()._open(at, lead)

    def _closing(self, start: int) -> int | None:
        """See `WholeCallParser`."""
        at = max(start, self._searched)
        for found in self._marks.finditer(self._buffer, at):
            mark, at = found.group(), found.end()
            if mark == self._quote:
                self._in_string = not self._in_string
            elif not self._in_string:
                self._depth += 1 if mark in "{[" else -1
                if not self._depth:
                    return at
        # The last characters may be the start of a quote.
        self._searched = max(at, len(self._buffer) - len(self._quote) + 1)
        return None

    def _arguments(self, text: str) -> str | None:
        """See `WholeCallParser`."""
        pieces: list[str] = []
        for part in self._parts.finditer(text):
            if part["string"] is not None:
                pieces.append(json.dumps(part["string"], ensure_ascii=False))
            elif part["mark"]:
                pieces.append(part["mark"])
            elif bare := part["bare"].strip():
                is_key = text.startswith(":", part.end())
                pieces.append(json.dumps(bare, ensure_ascii=False) if is_key else _value(bare))
        try:
            found = DECODER.decode("".join(pieces))
            return json.dumps(found, ensure_ascii=False)
        except (ValueError, RecursionError):
            return None


def _value(bare: str) -> str:
    """A value without quotes as JSON: a text that is no number and no word is a string."""
    if _NUMBER.fullmatch(bare):
        return bare
    return _WORDS.get(bare) or json.dumps(bare, ensure_ascii=False)


FORMATS = (
    BareKeyFormat(
        name="gemma4",
        markers=(r"<\|tool_call>call:",),
        begin=_CALL,
        end=_CALL_END,
        opening=(_CALL,),
        closing=_CALL_END,
        tags=(_CALL, _CALL_END, _QUOTE),
        quote=_QUOTE,
    ),
)
