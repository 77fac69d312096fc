"""Incremental parser of tool calls in generated text: what all formats share."""

import abc
import dataclasses
import re
import secrets
from collections.abc import Callable, Container, Iterable

from rjax.serve.parsing.tools.markers import partial_marker

MAX_HEAD = 512  # characters before the arguments of a call; names are shorter
_MOST_CALLS = 128


@dataclasses.dataclass(frozen=True, kw_only=True)
class CallTags:
    """The tags around calls. An output has runs of one or several calls.

    Attributes:
        opening: tags that begin a run, in order.
        again: tag before a further call of a run.
        closing: tag after each call.
        last: tag at the end of a run.
        joint: text between the calls of a run; None if each call is a run.
        anywhere: whether text may precede calls. If not, an output contains calls only if it starts
            with ``first``.
        first: character of calls at the start of an output.
        lead: tag that may come before it.
    """

    opening: tuple[str, ...] = ()
    again: str = ""
    closing: str = ""
    last: str = ""
    joint: str | None = None
    anywhere: bool = True
    first: str = ""
    lead: str = ""


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
        index: index of the call within the output.
        arguments: next piece of the arguments' JSON.
        id, name: set only in the call's first delta.
    """

    index: int
    arguments: str
    id: str | None = None
    name: str | None = None


class ToolCallParser(abc.ABC):
    """Splits generated text into content and tool calls, incrementally.

    Text that resembles a call but is invalid (malformed, an unknown function) stays content. White
    space around calls is dropped. A subclass reads a call from its state `_call` on.

    Args:
        fmt: tags of the model's tool-call format.
        names: functions that may be called.
        sign: replaces tags in a text by their signs.
        separators: characters between two calls of a run, besides white space.
        call_begin: text with which a further call of a run starts, if it is known.
    """

    def __init__(
        self,
        fmt: CallTags,
        names: Container[str],
        sign: Callable[[str], str],
        *,
        separators: str = "",
        call_begin: str = "",
    ) -> None:
        self._names = names
        self._opening = tuple(map(sign, fmt.opening))
        self._again, self._end, self._last = sign(fmt.again), sign(fmt.closing), sign(fmt.last)
        self._first, self._lead_tag = fmt.first, sign(fmt.lead)
        self._separators, self._call_begin = f"{separators} \n\t\r\f\v", call_begin
        self._runs = fmt.joint is not None
        self._buffer = ""  # text that is not emitted yet
        self._lead = ""  # text before the buffer; it becomes content if the buffer is not a call
        # Each state consumes part of the buffer and returns whether to run the next state.
        self._outside = self._text if fmt.anywhere else self._prose
        self._state: Callable[[bool], bool] = self._text if fmt.anywhere else self._start
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

    @abc.abstractmethod
    def _call(self, ended: bool) -> bool:
        """State: a possible call. It ends with `_reject`, or with the state `_closing_tag`."""

    def _text(self, ended: bool) -> bool:
        """State: content up to the opening tag of a call."""
        tag = self._opening[0]
        at = self._buffer.find(tag)
        if at < 0:
            at = len(self._buffer) - (0 if ended else partial_marker(self._buffer, tag))
        self._content.append(self._buffer[:at])
        self._buffer = self._buffer[at:]
        if not self._buffer.startswith(tag):
            return False
        self._state = self._opened
        return True

    def _opened(self, ended: bool) -> bool:
        """State: at the first opening tag; the others follow, or the tag is content."""
        at = len(self._opening[0])
        for tag in self._opening[1:]:
            rest = self._buffer[at:].lstrip()
            if not rest.startswith(tag):
                if tag.startswith(rest) and not ended:
                    return False
                self._lead = ""
                return self._reject(len(self._opening[0]))
            at = len(self._buffer) - len(rest) + len(tag)
        return self._open(at, self._buffer[:at])

    def _start(self, ended: bool) -> bool:
        """State: the start of an output that is either only calls or only content."""
        rest = self._buffer.lstrip()
        if self._lead_tag and rest.startswith(self._lead_tag):
            rest = rest[len(self._lead_tag) :].lstrip()
            if not rest and not ended:
                return False
        if rest.startswith(self._first):
            at = len(self._buffer) - len(rest) + sum(map(len, self._opening))
            return self._open(at, self._buffer[:at])
        if self._lead_tag.startswith(rest) and not ended:
            return False
        self._state = self._prose
        return True

    def _prose(self, ended: bool) -> bool:
        """State: only content until the end."""
        self._content.append(self._buffer)
        self._buffer = ""
        return False

    def _open(self, at: int, lead: str) -> bool:
        """A call may start at this place."""
        self._lead, self._buffer = lead, self._buffer[at:]
        self._state = self._call
        return True

    def _reject(self, size: int = 0) -> bool:
        """Make the text before the buffer and its first characters content."""
        self._content += self._lead, self._buffer[:size]
        self._buffer = self._buffer[size:]
        self._state = self._outside
        return True

    def _closing_tag(self, ended: bool) -> bool:
        """State: after a call; models often leave out the closing tag."""
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
        """State: after a call; another call, the end of the run, or content."""
        self._buffer = self._buffer.lstrip()
        rest = self._buffer.lstrip(self._separators)
        if not rest:
            if ended:
                self._buffer = ""
            return False
        next_call = self._again or self._call_begin
        lead = self._buffer[: len(self._buffer) - len(rest)]
        if self._last and rest.startswith(self._last):
            self._buffer = rest[len(self._last) :]
            self._state = self._after
        elif self._runs and rest.startswith(next_call):
            lead += self._again
            return self._open(len(lead), lead)
        elif not ended and any(
            tag.startswith(rest) for tag in (self._last, next_call) if self._runs and tag
        ):
            return False
        else:
            self._state = self._after
        return True

    def _after(self, ended: bool) -> bool:
        """State: white space after calls."""
        self._buffer = self._buffer.lstrip()
        if self._buffer:
            self._state = self._outside
        return bool(self._buffer)

    def _may_call(self, name: str) -> bool:
        return name in self._names and self.num_calls < _MOST_CALLS

    def _emit(self, name: str, arguments: str) -> None:
        """Start a call."""
        self._pieces.append(CallDelta(self.num_calls, arguments, id=new_call_id(), name=name))
        self.num_calls += 1

    def _emit_arguments(self, text: str) -> None:
        """Continue the last call."""
        if text:
            self._pieces.append(CallDelta(self.num_calls - 1, text))


class WholeCallParser(ToolCallParser):
    """Reports a call when it is complete: only then it is known to be valid.

    Attributes:
        head: matches a call's start; its group is the function's name, its end an open bracket.
        head_begin: matches what may become a head.
    """

    head: re.Pattern[str]
    head_begin: re.Pattern[str]

    @abc.abstractmethod
    def _closing(self, start: int) -> int | None:
        """Index in the buffer after the bracket that closes the one at ``start``; None if it has
        not come."""

    @abc.abstractmethod
    def _arguments(self, text: str) -> str | None:
        """The arguments as JSON, given with their brackets; None if they are malformed."""

    def _call(self, ended: bool) -> bool:
        """State: a possible call."""
        head = self.head.match(self._buffer, 0, MAX_HEAD)
        if head is None:
            text = self._buffer[:MAX_HEAD]
            if ended or len(text) == MAX_HEAD or not self.head_begin.fullmatch(text):
                return self._reject()
            return False
        if not self._may_call(head.group(1)):
            return self._reject()
        start = head.end() - 1
        stop = self._closing(start)
        if stop is None:
            return self._reject() if ended else False
        arguments = self._arguments(self._buffer[start:stop])
        if arguments is None:
            return self._reject()
        self._emit(head.group(1), arguments)
        self._buffer = self._buffer[stop:]
        self._state = self._closing_tag
        return True


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
