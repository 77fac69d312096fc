"""Interfaces of output formats and their incremental parsers."""

import dataclasses
from typing import NamedTuple, Protocol, runtime_checkable

from rjax.serve.parsing.tags import Tags
from rjax.serve.parsing.tools.base import Functions
from rjax.serve.parsing.tools.parser import CallDelta
from rjax.serve.protocol.requests import Tool
from rjax.structured.constraint import Constraint


@dataclasses.dataclass(slots=True)  # frozen ones take three times as long to make
class OutputDelta:
    """New parts of an output.

    Attributes:
        reasoning: the model's reasoning.
        content: the answer itself.
        calls: deltas of tool calls.
    """

    reasoning: str = ""
    content: str = ""
    calls: list[CallDelta] = dataclasses.field(default_factory=list)


class TextSpan(NamedTuple):
    """Characters ``start`` to ``end`` of an output's text that are reasoning, or content, without
    its markers.

    While it is ``is_open``, the text after ``end`` may still become part of it.
    """

    start: int
    end: int
    is_open: bool


@runtime_checkable
class OutputParser(Protocol):
    """Splits one output's text into its parts, incrementally."""

    @property
    def num_calls(self) -> int:
        """Number of tool calls so far, including an incomplete one."""
        ...

    @property
    def reasoning_spans(self) -> list[TextSpan]:
        """The spans of reasoning so far, in order."""
        ...

    @property
    def content_spans(self) -> list[TextSpan]:
        """The spans of content so far, in order. Tool calls that are part of one are not left
        out."""
        ...

    @property
    def parsed(self) -> int:
        """Characters whose part is known; those after them may be part of a marker."""
        ...

    @property
    def reasoning_limit(self) -> int | None:
        """Character after which there is no reasoning; None if unknown."""
        ...

    def feed(self, text: str, *, ended: bool = False) -> OutputDelta:
        """Parse more text, the last if ``ended``; return the new parts. The joined result does not
        depend on how the text is divided into pieces."""
        ...


@runtime_checkable
class OutputFormat(Protocol):
    """How a model writes reasoning, content and tool calls.

    Its parsers read text with signs for the ``tags`` that are tokens (`rjax.serve.parsing.tags`).
    The ``start`` state of an output follows from the end of its prompt, for example whether the
    prompt has opened the reasoning.
    """

    @property
    def tags(self) -> Tags:
        """The tags of its outputs."""
        ...

    @property
    def reasons(self) -> bool:
        """Whether outputs may have reasoning."""
        ...

    @property
    def prompt_tokens(self) -> int:
        """Tokens at the prompt's end that determine ``start``; 0 if it does not depend on them."""
        ...

    def start(self, tail: str, continued: str | None) -> str:
        """The start state of an output.

        Args:
            tail: text of the prompt's last ``prompt_tokens`` tokens.
            continued: content of the message that the output continues; None if it does not.
        """
        ...

    def shows_special_tokens(self, tools: bool) -> bool:
        """Whether the parser needs special tokens in the text."""
        ...

    def parser(self, start: str, functions: Functions) -> OutputParser:
        """A parser of one output, in which these functions may be called."""
        ...

    def calls_grammar(self, tools: list[Tool], *, several: bool, literal: bool) -> str:
        """A Lark grammar of one or several calls of these functions, without other text.

        Args:
            tools: the functions.
            several: whether more than one call is allowed.
            literal: do not close objects; see `rjax.structured.schemas.generation_schema`.

        Raises:
            InvalidRequestError: a grammar cannot express a schema, or the format of the calls is
                not known.
        """
        ...

    def text_or_calls_grammar(self, tools: list[Tool], *, several: bool, literal: bool) -> str:
        """A Lark grammar of text with optional calls; see `calls_grammar`. Arguments of strict
        functions match their schemas; arguments of other functions are any object."""
        ...

    def after_reasoning(self, constraint: Constraint, start: str, *, calls: bool) -> Constraint:
        """Apply a constraint to the part of the output after its reasoning.

        Args:
            constraint: constraint on the output without its reasoning.
            start: start state of the output.
            calls: whether it is a tool-call grammar of this format; otherwise it constrains the
                content.
        """
        ...
