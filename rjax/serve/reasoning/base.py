"""What every form of answers offers: readers of its text, and constraints that respect it."""

import dataclasses
from typing import NamedTuple, Protocol, runtime_checkable

from rjax.serve.requests import Tool
from rjax.serve.tools import CallDelta
from rjax.structured.constraint import Constraint


@dataclasses.dataclass(frozen=True, slots=True)
class OutputDelta:
    """What follows of an answer's parts.

    Attributes:
        reasoning: what the model thinks before it answers.
        content: what it answers.
        calls: pieces of tool calls.
    """

    reasoning: str = ""
    content: str = ""
    calls: list[CallDelta] = dataclasses.field(default_factory=list)


class ReasoningSpan(NamedTuple):
    """Where reasoning lies in an answer's text: characters ``start`` to ``end``, without its marks.

    While it is ``is_open``, more may follow, and what is after ``end`` is not decided yet.
    """

    start: int
    end: int
    is_open: bool


@runtime_checkable
class OutputParser(Protocol):
    """Splits one answer's text into its parts while it comes in."""

    @property
    def num_calls(self) -> int:
        """Tool calls that have begun."""
        ...

    @property
    def reasoning_spans(self) -> list[ReasoningSpan]:
        """The reasoning so far, in order."""
        ...

    @property
    def reasoning_limit(self) -> int | None:
        """Character of the text behind which there is no reasoning; None while there may be."""
        ...

    def feed(self, text: str, *, ended: bool = False) -> OutputDelta:
        """Take more text, the last if ``ended``; return what is now certain. However the text is
        cut, the joined pieces are the same."""
        ...


@runtime_checkable
class OutputFormat(Protocol):
    """How a model writes reasoning, content and tool calls.

    The ``start`` of an answer is what its prompt says about it: whether the model is thinking
    already, for one.
    """

    @property
    def reasons(self) -> bool:
        """Whether answers may have reasoning."""
        ...

    @property
    def prompt_tokens(self) -> int:
        """Tokens at a prompt's end that tell the start; 0 if the prompt does not matter."""
        ...

    def start(self, tail: str, continued: str | None) -> str:
        """How an answer starts.

        Args:
            tail: text of the prompt's last ``prompt_tokens`` tokens.
            continued: content of the message that the answer continues, if it does.
        """
        ...

    def shows_special_tokens(self, tools: bool) -> bool:
        """Whether special tokens must stay in the text that a reader gets."""
        ...

    def parser(self, start: str, names: frozenset[str]) -> OutputParser:
        """A reader of one answer; ``names`` are the functions that may be called."""
        ...

    def calls_grammar(self, tools: list[Tool], *, several: bool, literal: bool) -> str:
        """A Lark grammar of nothing but a call, or several, of these functions.

        Args:
            tools: the functions.
            several: whether more than one call may follow.
            literal: as in `rjax.structured.schemas.generation_schema`.
        """
        ...

    def text_or_calls_grammar(self, tools: list[Tool], *, several: bool, literal: bool) -> str:
        """A Lark grammar of any text, in which the calls of strict functions match their schemas
        and those of others have any object; see `calls_grammar`."""
        ...

    def after_reasoning(self, constraint: Constraint, start: str, *, calls: bool) -> Constraint:
        """The same constraint on what comes after the reasoning.

        Args:
            constraint: on the answer without its reasoning.
            start: of the answer.
            calls: whether it is a grammar of this format; if not, it is on the content.
        """
        ...
