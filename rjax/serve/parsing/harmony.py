"""Incremental parser of OpenAI's harmony format, which gpt-oss uses."""

import re
from collections.abc import Callable, Container
from typing import Literal

from rjax.serve.parsing.base import OutputDelta, TextSpan
from rjax.serve.parsing.tags import tag_signs
from rjax.serve.parsing.tools.parser import CallDelta, new_call_id

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
TAGS = (START, CHANNEL, MESSAGE, CONSTRAIN, END, CALL, RETURN)
FUNCTIONS = "functions."
_START, _CHANNEL, _MESSAGE, _CONSTRAIN, _END, _CALL, _RETURN = tag_signs(TAGS).values()
_ROLE = f"{_START}assistant"
_CHANNELS = ("analysis", "commentary", "final")
_BODY_END = re.compile(f"[{_END}{_CALL}{_RETURN}{_START}{_CHANNEL}]")
_HEADER_END = re.compile(f"[{_MESSAGE}{_END}{_CALL}{_RETURN}{_START}]")
_CHANNEL_NAME = re.compile(rf"{_CHANNEL}\s*({'|'.join(_CHANNELS)}|[a-z]*)")
_NAME = rf"[^\s<{_CHANNEL}{_CONSTRAIN}]"
_RECIPIENT = re.compile(rf"\bto=({_NAME}+)")
# Parts of a header after its channel; any text behind them is that of a message without MESSAGE.
_AFTER_CHANNEL = re.compile(rf"(\s*to={_NAME}*)?\s*{_CONSTRAIN}?\s*(json\b)?\s*")
_AFTER_ROLE = (_CHANNEL, _MESSAGE, _CONSTRAIN, "to=")
_MAX_HEADER = 512  # characters; names are shorter
_MOST_CALLS = 128


class HarmonyParser:
    """Splits the messages of one output by their channels, incrementally.

    The channel ``analysis`` is reasoning. A message to ``functions.name`` is a tool call if the
    name is known. All other text is content: the channel ``final``, other ``commentary`` and text
    without a header. Messages of one kind are joined by a line break.

    Models sometimes leave out ``MESSAGE``. Such a header ends where the message does, and the text
    behind its parts is content in the channel ``final``, arguments in a call, and else reasoning.

    The text has signs for the format's tags (`rjax.serve.parsing.tags`), which are all tokens.

    Args:
        header: the part of the first message's header that the prompt contains.
        names: functions that may be called.
    """

    def __init__(self, header: str, names: Container[str]) -> None:
        self._names = names
        self._buffer = header  # text that is not emitted yet
        self._fed = 0  # characters, without the header
        self._spans: list[TextSpan] = []
        self._content_spans: list[TextSpan] = []
        # Each state consumes part of the buffer and returns whether to run the next state.
        self._state: Callable[[bool], bool] = self._between
        self._kind: Literal["reasoning", "content", "call"] = "content"
        self._begun: set[str] = set()  # kinds with emitted text
        self._break = ""  # to emit before the next text
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._pieces: list[CallDelta] = []
        self.num_calls = 0

    def feed(self, text: str, *, ended: bool = False) -> OutputDelta:
        """Parse more text, the last if ``ended``; return the new parts."""
        self._buffer += text
        self._fed += len(text)
        while self._state(ended):
            pass
        found = OutputDelta("".join(self._reasoning), "".join(self._content), self._pieces)
        self._reasoning, self._content, self._pieces = [], [], []
        return found

    @property
    def reasoning_spans(self) -> list[TextSpan]:
        """See `OutputParser`."""
        if self._spans and self._spans[-1].is_open:
            return [*self._spans[:-1], self._spans[-1]._replace(end=self._position())]
        return self._spans

    @property
    def content_spans(self) -> list[TextSpan]:
        """See `OutputParser`."""
        return self._content_spans

    @property
    def parsed(self) -> int:
        """See `OutputParser`."""
        return self._position()

    @property
    def reasoning_limit(self) -> int | None:
        """See `OutputParser`."""
        return None

    def _position(self) -> int:
        """Position of the buffer in the output's text."""
        return self._fed - len(self._buffer)

    def _between(self, ended: bool) -> bool:
        """State: before a message."""
        self._buffer = text = self._buffer.lstrip()
        if text.startswith((_START, _CHANNEL, _MESSAGE)):
            self._state = self._header
            return True
        if text:
            self._open("content")
        return bool(text)

    def _header(self, ended: bool) -> bool:
        """State: a message header up to ``MESSAGE`` or the message's end; an invalid one becomes
        content.

        Only the first ``_MAX_HEADER`` characters decide, in order, so that the decision does not
        depend on how the text is divided into pieces.
        """
        text = self._buffer
        header = text[:_MAX_HEADER]
        after_role = header[len(_ROLE) :].lstrip() if header.startswith(_ROLE) else ""
        follows = _may_follow_role(after_role)
        full = len(header) == _MAX_HEADER
        if follows:
            end = _HEADER_END.search(header, len(_START) if header.startswith(_START) else 0)
            if end is not None and end.group() == _MESSAGE:
                self._buffer = text[end.end() :]
                self._open_by(text[: end.start()])
                return True
            whole = header if end is None else header[: end.start()]
            if end is not None or (_channel(whole) in _CHANNELS if full else ended):
                self._open_without_message(whole)
                return True
        if full or not follows:
            self._open("content")
            if after_role:
                self._buffer = text[len(header) - len(after_role) :]
            else:  # the marker itself becomes content
                marker = _START if text.startswith(_START) else _CHANNEL
                self._emit(marker)
                self._buffer = text.removeprefix(marker)
            return True
        return False

    def _open_by(self, header: str) -> None:
        """Start the message of this header."""
        if not self._open_call(header):
            self._open("reasoning" if _channel(header) == "analysis" else "content")

    def _open_without_message(self, header: str) -> None:
        """Start the message of a header without ``MESSAGE``, with the text that the header has."""
        start = _text_start(header)
        text = header[start:]
        self._buffer = self._buffer[start:]
        if any(part.startswith(text) for part in _AFTER_ROLE):  # nothing, or the start of a part
            self._buffer = self._buffer[len(text) :]
            self._open("content")
        elif not text.startswith("{") or not self._open_call(header[:start]):
            self._open("content" if _channel(header) == "final" else "reasoning")

    def _open_call(self, header: str) -> bool:
        """Start the call of this header, if its recipient is a known function."""
        recipient = _RECIPIENT.search(header)
        name = recipient.group(1).removeprefix(FUNCTIONS) if recipient else None
        if name is None or name not in self._names or self.num_calls >= _MOST_CALLS:
            return False
        self._pieces.append(CallDelta(self.num_calls, "", id=new_call_id(), name=name))
        self.num_calls += 1
        self._kind, self._state = "call", self._body
        return True

    def _open(self, kind: Literal["reasoning", "content"]) -> None:
        self._kind, self._state = kind, self._body
        self._break = "\n" if kind in self._begun else ""
        if kind == "reasoning":
            place = max(0, self._position())
            self._spans.append(TextSpan(place, place, is_open=True))

    def _body(self, ended: bool) -> bool:
        end = _BODY_END.search(self._buffer)
        if end is None:
            self._emit(self._buffer)
            self._buffer = ""
            return False
        self._emit(self._buffer[: end.start()])
        if self._spans and self._spans[-1].is_open:
            place = self._position() + end.start()
            self._spans[-1] = self._spans[-1]._replace(end=place, is_open=False)
        if self._content_spans:
            self._content_spans[-1] = self._content_spans[-1]._replace(is_open=False)
        # Keep a marker that starts the next header.
        opens = end.group() in (_START, _CHANNEL)
        self._buffer = self._buffer[end.start() if opens else end.end() :]
        self._state = self._between
        return True

    def _emit(self, text: str) -> None:
        if not text:
            return
        if self._kind == "call":
            self._pieces.append(CallDelta(self.num_calls - 1, text))
            return
        if self._kind == "content":
            self._extend_content(len(text))
        parts = self._reasoning if self._kind == "reasoning" else self._content
        parts += self._break, text
        self._begun.add(self._kind)
        self._break = ""

    def _extend_content(self, count: int) -> None:
        """Note that the next ``count`` characters of the buffer are content."""
        place, spans = max(0, self._position()), self._content_spans
        if spans and spans[-1].is_open:
            spans[-1] = spans[-1]._replace(end=place + count)
        else:
            spans.append(TextSpan(place, place + count, is_open=True))


def _may_follow_role(text: str) -> bool:
    """Whether a header may continue with this (possibly incomplete) text after its role."""
    return any(part.startswith(text[: len(part)]) for part in _AFTER_ROLE)


def _channel(header: str) -> str:
    """The name of a header's channel, the last one if it has several; empty if it has none."""
    return "".join(_CHANNEL_NAME.findall(header)[-1:])


def _text_start(header: str) -> int:
    """Index of the text of a header without ``MESSAGE``, behind its channel and other parts."""
    start = 0
    for channel in _CHANNEL_NAME.finditer(header):
        start = channel.end()
    parts = _AFTER_CHANNEL.match(header, start) if start else None
    return len(header) if parts is None else parts.end()
