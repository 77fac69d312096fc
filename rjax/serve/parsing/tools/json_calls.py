"""Formats that write a call's arguments as JSON."""

import dataclasses
import json
import re
from collections.abc import Callable, Container

from rjax.serve.parsing.tools.arguments import arguments_rule
from rjax.serve.parsing.tools.base import NAME, Functions, ToolFormat
from rjax.serve.parsing.tools.brackets import BracketScanner
from rjax.serve.parsing.tools.parser import MAX_HEAD, ToolCallParser
from rjax.serve.protocol.requests import Tool
from rjax.structured.lark import SpecialTokens, quoted

_NAME = r"([a-zA-Z0-9_.-]+)"
_OBJECT_HEAD = re.compile(
    r'\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?'
    rf'"name"\s*:\s*"{_NAME}"\s*,\s*"(?:arguments|parameters)"\s*:\s*'
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class JsonFormat(ToolFormat):
    """A call is the function's name and a JSON object of its arguments.

    Attributes:
        head, tail: text around the arguments, with ``NAME`` for the function's name. A head that
            starts with a brace makes the call a JSON object with the keys "name" and "arguments"
            or "parameters".
        more: Lark expression of what may follow the arguments in the object.
        separators: characters that a parser skips between the calls of a run.
    """

    head: str
    tail: str = ""
    more: str = ""
    separators: str = ""

    def parser(self, functions: Functions, sign: Callable[[str], str]) -> ToolCallParser:
        """See `ToolFormat`."""
        return JsonCallParser(self, functions, sign)

    def one_call(self, name: str, arguments: str) -> str:
        """See `ToolFormat`."""
        return f"{self.head.replace(NAME, name)}{arguments}{self.tail}"

    def call_rules(
        self, i: int, tool: Tool, special_tokens: SpecialTokens, *, strict: bool, literal: bool
    ) -> list[str]:
        """See `ToolFormat`."""
        head = special_tokens.rule(self.head.replace(NAME, tool.function.name))
        return [
            f"call_{i}: {head} arguments_{i} {self.more} {quoted(self.tail)}",
            f"arguments_{i}: {arguments_rule(tool, strict=strict, literal=literal)}",
        ]


class JsonCallParser(ToolCallParser):
    """Reports a call when its function's name is known and its arguments start, and streams the
    arguments as the model writes them. An object with its keys in another order is reported when
    it is complete.

    Args:
        fmt: tool-call format of the model.
        names: functions that may be called.
        sign: replaces tags in a text by their signs.
    """

    def __init__(
        self, fmt: JsonFormat, names: Container[str], sign: Callable[[str], str] = str
    ) -> None:
        self._object = fmt.head.startswith("{")
        begin = "{" if self._object else ""
        super().__init__(fmt, names, sign, separators=fmt.separators, call_begin=begin)
        spaced = r"\s*".join(map(re.escape, re.split(r"\s+", sign(fmt.head))))
        named = re.compile(r"\s*" + spaced.replace(re.escape(NAME), _NAME))
        self._head = _OBJECT_HEAD if self._object else named
        self._searched = 0  # characters of the buffer that do not contain the call's end
        self._scanner = BracketScanner()

    def _open(self, at: int, lead: str) -> bool:
        self._searched, self._scanner = 0, BracketScanner()
        return super()._open(at, lead)

    def _call(self, ended: bool) -> bool:
        """State: start a call, or wait until it is complete."""
        head = self._head.match(self._buffer, 0, MAX_HEAD)
        if head and self._may_call(head.group(1)):
            if head.end() == len(self._buffer) and not ended:
                return False
            if self._buffer.startswith("{", head.end()):
                self._emit(head.group(1), "")
                self._buffer = self._buffer[head.end() :]
                self._scanner, self._state = BracketScanner(int(self._object)), self._arguments
                return True
        stop = self._whole_call(ended)
        if stop is None:
            return False
        inner = self._buffer[:stop]
        call = self._parse(inner) if self._object else None
        if call is None:
            return self._reject(stop + len(self._end) if self._end else stop)
        self._buffer = self._buffer[stop:]
        self._emit(*call)
        self._state = self._closing_tag
        return True

    def _whole_call(self, ended: bool) -> int | None:
        """The end of a possible call before its closing tag; None if more text decides."""
        text = self._buffer
        if self._end:
            stop = text.find(self._end, self._searched)
            self._searched = max(0, len(text) - len(self._end) + 1)
            return stop if stop >= 0 else len(text) if ended else None
        if not self._object:
            return 0 if ended or len(text) >= MAX_HEAD or self._head.match(text) else None
        if text.lstrip()[:1] not in ("", "{"):
            return 0
        stop = self._scanner.closing(text[self._searched :], 0)
        if stop is None:
            self._searched = len(text)
            return len(text) if ended else None
        return self._searched + stop

    def _arguments(self, ended: bool) -> bool:
        """State: the arguments of a call."""
        stop = self._scanner.closing(self._buffer, int(self._object))
        text = self._buffer[:stop]
        self._emit_arguments(text)
        self._buffer = self._buffer[len(text) :]
        if stop is None:
            return False
        self._state = self._closed if self._object else self._closing_tag
        return True

    def _closed(self, ended: bool) -> bool:
        """State: after the arguments in an object; a missing brace is forgiven."""
        self._buffer = self._buffer.lstrip()
        if not self._buffer:
            return False
        self._state = self._members if self._buffer[0] in "},]" else self._closing_tag
        return True

    def _members(self, ended: bool) -> bool:
        """State: the rest of an object after its arguments."""
        stop = self._scanner.closing(self._buffer, 0)
        self._buffer = "" if stop is None else self._buffer[stop:]
        if stop is None:
            return False
        self._state = self._closing_tag
        return True

    def _parse(self, text: str) -> tuple[str, str] | None:
        """Name and arguments of a complete call; None if it is invalid."""
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            return None
        if not isinstance(found, dict):
            return None
        name = found.get("name")
        arguments = found.get("arguments", found.get("parameters"))
        if not isinstance(name, str) or not self._may_call(name):
            return None
        if not isinstance(arguments, dict):
            return None
        return name, json.dumps(arguments, ensure_ascii=False)
