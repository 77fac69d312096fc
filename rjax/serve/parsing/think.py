"""Incremental parser of reasoning between tags such as <think> and </think>."""

import dataclasses
from collections.abc import Callable
from typing import Literal

from rjax.serve.parsing.base import TextSpan
from rjax.serve.parsing.tools.markers import partial_marker

type Thinking = Literal["inside", "undecided", "outside"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ThinkTags:
    """The tags of a model's reasoning.

    Attributes:
        begin, end: the tags.
        label: text between the opening tag and the reasoning, if it is there.
        inside_at_first: whether an output without an opening tag, in its prompt or at its start, is
            reasoning up to the closing tag. If not, it has no reasoning.
    """

    begin: str = "<think>"
    end: str = "</think>"
    label: str = ""
    inside_at_first: bool

    def thinking(self, tail: str, continued: str | None) -> Thinking:
        """The start state of an output.

        Args:
            tail: end of the prompt's text. A template may open the reasoning there, or open and
                close it if thinking is disabled.
            continued: the content that the output continues; None if it does not.
        """
        if continued is not None:
            return (
                "inside" if continued.rfind(self.begin) > continued.rfind(self.end) else "outside"
            )
        if tail.rstrip().endswith((self.begin, f"{self.begin}{self.label}".rstrip())):
            return "inside"
        if tail.rstrip().endswith(self.end):
            return "outside"
        return "inside" if self.inside_at_first else "undecided"


class ThinkParser:
    """Splits an output at its reasoning tags, incrementally.

    White space around the tags is dropped, and the label. Without a closing tag, the rest is
    reasoning.

    Args:
        tags: the model's reasoning tags.
        thinking: start state of the output.
    """

    def __init__(self, tags: ThinkTags, thinking: Thinking) -> None:
        self._begin, self._end, self._label = tags.begin, tags.end, tags.label
        self._inside_at_first = thinking == "inside"
        self._buffer = ""
        self._fed = 0  # characters
        self._from: int | None = None  # of the reasoning, in the text
        self._to: int | None = None
        self._content_from: int | None = 0 if thinking == "outside" else None
        # Each state returns new reasoning, new content, and whether to run the next state.
        self._state: Callable[[bool], tuple[str, str, bool]] = (
            self._content if thinking == "outside" else self._opening
        )

    def feed(self, text: str, *, ended: bool = False) -> tuple[str, str]:
        """Parse more text, the last if ``ended``; return new reasoning and content."""
        self._buffer += text
        self._fed += len(text)
        reasoning, content = "", ""
        going = True
        while going:
            thought, said, going = self._state(ended)
            reasoning, content = reasoning + thought, content + said
        return reasoning, content

    @property
    def reasoning_spans(self) -> list[TextSpan]:
        """See `OutputParser`."""
        if self._from is None:
            return []
        if self._to is None:
            return [TextSpan(self._from, self._position(), is_open=True)]
        return [TextSpan(self._from, self._to, is_open=False)]

    @property
    def content_spans(self) -> list[TextSpan]:
        """See `OutputParser`."""
        if self._content_from is None:
            return []
        return [TextSpan(self._content_from, self.parsed, is_open=True)]

    @property
    def parsed(self) -> int:
        """See `OutputParser`."""
        return self._position()

    @property
    def reasoning_limit(self) -> int | None:
        """See `OutputParser`."""
        return 0 if self._state == self._content and self._from is None else self._to

    def _position(self) -> int:
        """Position of the buffer in the output's text."""
        return self._fed - len(self._buffer)

    def _opening(self, ended: bool) -> tuple[str, str, bool]:
        """State: the start of the output, which may repeat an opening tag of the prompt."""
        text = self._buffer.lstrip()
        if text.startswith(self._begin):
            self._buffer = text[len(self._begin) :]
            self._from, self._state = self._position(), self._labelled
        elif self._begin.startswith(text) and not ended:
            return "", "", False
        elif self._inside_at_first:
            self._from, self._state = self._position(), self._labelled
        else:
            self._content_from, self._state = self._position(), self._content
        return "", "", True

    def _labelled(self, ended: bool) -> tuple[str, str, bool]:
        """State: the label, if there is one."""
        if self._label.startswith(self._buffer) and self._buffer != self._label and not ended:
            return "", "", False
        self._buffer = self._buffer.removeprefix(self._label)
        self._from, self._state = self._position(), self._gap
        return "", "", True

    def _gap(self, ended: bool) -> tuple[str, str, bool]:
        """State: white space before the reasoning."""
        self._buffer = self._buffer.lstrip()
        if not self._buffer:
            return "", "", False
        self._state = self._reasoning
        return "", "", True

    def _reasoning(self, ended: bool) -> tuple[str, str, bool]:
        at = self._buffer.find(self._end)
        if at >= 0:
            self._to = self._position() + at
            found, self._buffer = self._buffer[:at], self._buffer[at + len(self._end) :]
            self._state = self._gap_after
            return found.rstrip(), "", True
        if ended:
            found, self._buffer = self._buffer, ""
            return found.rstrip(), "", False
        held = partial_marker(self._buffer, self._end)
        found = self._buffer[: len(self._buffer) - held].rstrip()
        self._buffer = self._buffer[len(found) :]
        return found, "", False

    def _gap_after(self, ended: bool) -> tuple[str, str, bool]:
        """State: white space before the content."""
        self._buffer = self._buffer.lstrip()
        if not self._buffer:
            return "", "", False
        self._content_from, self._state = self._position(), self._content
        return "", "", True

    def _content(self, ended: bool) -> tuple[str, str, bool]:
        found, self._buffer = self._buffer, ""
        return "", found, False
