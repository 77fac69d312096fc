"""Incremental parser of tool calls in generated text."""

import dataclasses
import json
import re
import secrets
from collections.abc import Callable, Iterable

from rjax.serve.markers import partial_marker
from rjax.serve.tools.formats import PYTHON_TAG, ToolFormat

_DECODER = json.JSONDecoder()
_MOST_CALLS = 128
_MAX_HEAD = 512  # characters before the arguments; names are shorter
_HEAD = re.compile(
    r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?'
    r'"name"\s*:\s*"([a-zA-Z0-9_.-]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*'
)


@dataclasses.dataclass(frozen=True, slots=True)
class ParsedCall:
    """A complete call: its id, the function's name and its arguments as JSON."""

    id: str
    name: str
    arguments: str


@dataclasses.dataclass(frozen=True, slots=True)
class CallDelta:
    """A delta of one call.

    Attributes:
        index: of the call within the output.
        arguments: next piece of the arguments' JSON.
        id, name: set only in the call's first delta.
    """

    index: int
    arguments: str
    id: str | None = None
    name: str | None = None


class ToolCallParser:
    """Splits generated text into content and tool calls, incrementally.

    A call is reported when its function's name is known and its arguments start; its arguments are
    then streamed as the model writes them. A call with its keys in another order is reported when
    it is complete. Text that resembles a call but is invalid (malformed JSON, an unknown function)
    stays content. White space around calls is dropped.

    Args:
        fmt: how this model writes calls.
        names: functions that may be called.
        python_tag: Llama's tag before calls, as it is in the text.
    """

    def __init__(
        self, fmt: ToolFormat, names: frozenset[str], *, python_tag: str = PYTHON_TAG
    ) -> None:
        self._format = fmt
        self._python_tag = python_tag
        self._lead_form = re.compile(rf"\s*(?:{re.escape(python_tag)}\s*)?")
        self._begin, self._end = fmt.begin.strip(), fmt.end.strip()
        self._names = names
        self._buffer = ""  # text that is not emitted yet
        self._lead = ""  # text before the buffer; it becomes content if the buffer is not a call
        self._searched = 0  # characters of the buffer that do not contain the call's end
        # Each state consumes part of the buffer and returns whether to run the next state.
        self._state: Callable[[bool], bool] = self._text if fmt.anywhere else self._opening
        self._depth = 0  # of objects and lists around the next character of a call
        self._quoted = self._escaped = False
        self._content: list[str] = []
        self._pieces: list[CallDelta] = []
        self.num_calls = 0

    def feed(self, text: str, *, ended: bool = False) -> tuple[str, list[CallDelta]]:
        """Parse more text, the last if ``ended``; return new content and call deltas."""
        self._buffer += text
        while self._state(ended):
            pass
        found = "".join(self._content), self._pieces
        self._content, self._pieces = [], []
        return found

    def _text(self, ended: bool) -> bool:
        """State: content up to the opening tag of a call."""
        at = self._buffer.find(self._begin)
        if at >= 0:
            self._content.append(self._buffer[:at])
            self._open(at + len(self._begin), self._begin)
            return True
        keep = 0 if ended else partial_marker(self._buffer, self._begin)
        cut = len(self._buffer) - keep
        self._content.append(self._buffer[:cut])
        self._buffer = self._buffer[cut:]
        return False

    def _opening(self, ended: bool) -> bool:
        """State: the start of an output that is either only calls or only content."""
        lead = self._lead_form.match(self._buffer)
        assert lead is not None
        rest = self._buffer[lead.end() :]
        if rest.startswith("{"):
            self._open(lead.end(), lead.group())
        elif self._python_tag.startswith(rest) and not ended:
            return False
        else:
            self._state = self._prose
        return True

    def _prose(self, ended: bool) -> bool:
        """State: only content until the end."""
        self._content.append(self._buffer)
        self._buffer = ""
        return False

    def _open(self, at: int, lead: str) -> None:
        self._lead, self._buffer, self._searched = lead, self._buffer[at:], 0
        self._state = self._object

    def _object(self, ended: bool) -> bool:
        """State: a possible call; start it, or wait until it is complete."""
        start = len(self._buffer) - len(self._buffer.lstrip())
        head = _HEAD.match(self._buffer, start, start + _MAX_HEAD)
        if head and head.group(1) in self._names and self.num_calls < _MOST_CALLS:
            if head.end() == len(self._buffer) and not ended:
                return False
            if self._buffer.startswith("{", head.end()):
                self._emit(head.group(1), "")
                self._buffer = self._buffer[head.end() :]
                self._depth, self._quoted, self._escaped = 1, False, False
                self._state = self._arguments
                return True
        return self._whole_object(ended)

    def _whole_object(self, ended: bool) -> bool:
        text = self._buffer
        if self._end:
            # Models often end the output without the closing tag.
            stop = text.find(self._end, self._searched)
            if stop < 0 and not ended:
                self._searched = max(0, len(text) - len(self._end) + 1)
                return False
            inner = text if stop < 0 else text[:stop]
            self._buffer = "" if stop < 0 else text[stop + len(self._end) :]
        elif not ended:
            return False
        else:
            try:
                inner = text[: _DECODER.raw_decode(text)[1]]
            except (ValueError, RecursionError):
                inner = text
            self._buffer = text[len(inner) :]
        call = self._parse(inner)
        if call is not None:
            self._emit(*call)
            self._state = self._between
        else:
            self._content += self._lead, text[: len(text) - len(self._buffer)]
            self._state = self._text if self._format.anywhere else self._prose
        return True

    def _arguments(self, ended: bool) -> bool:
        """State: the arguments of a call."""
        stop = self._closing(1)
        if self._buffer:
            text = self._buffer[:stop]
            self._pieces.append(CallDelta(self.num_calls - 1, text))
            self._buffer = self._buffer[len(text) :]
        if stop is None:
            return False
        self._state = self._closed
        return True

    def _closed(self, ended: bool) -> bool:
        """What an object holds after its arguments; a missing brace is forgiven."""
        self._buffer = self._buffer.lstrip()
        if not self._buffer:
            return False
        self._state = self._members if self._buffer[0] in "},]" else self._closing_tag
        return True

    def _members(self, ended: bool) -> bool:
        stop = self._closing(0)
        self._buffer = "" if stop is None else self._buffer[stop:]
        if stop is None:
            return False
        self._state = self._closing_tag
        return True

    def _closing_tag(self, ended: bool) -> bool:
        self._buffer = self._buffer.lstrip()
        if self._buffer.startswith(self._end):
            self._buffer = self._buffer[len(self._end) :]
        elif self._end.startswith(self._buffer):
            if ended:
                self._buffer = ""
            return False
        self._state = self._between
        return True

    def _between(self, ended: bool) -> bool:
        """State: after a call; white space, then another call or content."""
        separators = self._format.separator + " \n\t,"
        rest = self._buffer.lstrip() if self._format.anywhere else self._buffer.lstrip(separators)
        if not rest:
            if ended:
                self._buffer = ""
            return False
        lead = self._buffer[: len(self._buffer) - len(rest)]
        if self._format.anywhere:
            self._buffer, self._state = rest, self._text
        elif rest.startswith("{"):
            self._open(len(lead), lead)
        else:
            self._buffer, self._state = self._buffer.lstrip(), self._prose
        return True

    def _closing(self, floor: int) -> int | None:
        """Index after the bracket that lowers the nesting depth to ``floor``; None if there is
        none."""
        for i, char in enumerate(self._buffer):
            if self._escaped:
                self._escaped = False
            elif self._quoted:
                self._escaped, self._quoted = char == "\\", char != '"'
            elif char == '"':
                self._quoted = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth <= floor:
                    return i + 1
        return None

    def _emit(self, name: str, arguments: str) -> None:
        """Start a call."""
        self._pieces.append(CallDelta(self.num_calls, arguments, id=new_call_id(), name=name))
        self.num_calls += 1

    def _parse(self, text: str) -> tuple[str, str] | None:
        """Name and arguments of a complete call; None if it is invalid."""
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            return None
        if not isinstance(found, dict) or self.num_calls >= _MOST_CALLS:
            return None
        name = found.get("name")
        arguments = found.get("arguments", found.get("parameters"))
        if not isinstance(name, str) or name not in self._names:
            return None
        if not isinstance(arguments, dict):
            return None
        return name, json.dumps(arguments, ensure_ascii=False)


def new_call_id() -> str:
    """A new unique id of a call."""
    return f"call_{secrets.token_hex(12)}"


def join_call_deltas(pieces: Iterable[CallDelta]) -> list[ParsedCall]:
    """Join all deltas of an output to complete calls."""
    calls: list[ParsedCall] = []
    for piece in pieces:
        if piece.id is not None and piece.name is not None:
            calls.append(ParsedCall(piece.id, piece.name, piece.arguments))
        else:
            last = calls[piece.index]
            calls[piece.index] = dataclasses.replace(
                last, arguments=last.arguments + piece.arguments
            )
    return calls
