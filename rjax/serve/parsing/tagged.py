"""Outputs with tags as an `OutputFormat`: reasoning first, then content and tool calls."""

import dataclasses
from typing import cast

from rjax.errors import InvalidRequestError
from rjax.serve.parsing.base import OutputDelta, TextSpan
from rjax.serve.parsing.tags import Tags
from rjax.serve.parsing.think import Thinking, ThinkParser, ThinkTags
from rjax.serve.parsing.tools.base import Functions, ToolFormat
from rjax.serve.parsing.tools.parser import ToolCallParser
from rjax.serve.protocol.requests import Tool
from rjax.structured.constraint import Constraint
from rjax.structured.lark import TEXT_RULE, SpecialTokens, regex_text


class TaggedParser:
    """Splits an output into reasoning, content and tool calls; calls in the reasoning are ignored.

    Args:
        think: parser of the reasoning; None if the model does not reason.
        calls: parser of the calls; None if there are no functions.
    """

    def __init__(self, think: ThinkParser | None, calls: ToolCallParser | None) -> None:
        self._think = think
        self._calls = calls
        self._fed = 0  # characters

    @property
    def num_calls(self) -> int:
        """See `OutputParser`."""
        return 0 if self._calls is None else self._calls.num_calls

    @property
    def reasoning_spans(self) -> list[TextSpan]:
        """See `OutputParser`."""
        return [] if self._think is None else self._think.reasoning_spans

    @property
    def content_spans(self) -> list[TextSpan]:
        """See `OutputParser`."""
        if self._think is None:
            return [TextSpan(0, self._fed, is_open=True)]
        return self._think.content_spans

    @property
    def parsed(self) -> int:
        """See `OutputParser`."""
        return self._fed if self._think is None else self._think.parsed

    @property
    def reasoning_limit(self) -> int | None:
        """See `OutputParser`."""
        return 0 if self._think is None else self._think.reasoning_limit

    def feed(self, text: str, *, ended: bool = False) -> OutputDelta:
        """Parse more text, the last if ``ended``; return the new parts."""
        self._fed += len(text)
        reasoning = ""
        if self._think is not None:
            reasoning, text = self._think.feed(text, ended=ended)
        if self._calls is None:
            return OutputDelta(reasoning, text)
        content, calls = self._calls.feed(text, ended=ended)
        return OutputDelta(reasoning, content, calls)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TaggedFormat:
    """Optional tags around the reasoning, and a tool-call format. The start state is a `Thinking`.

    Attributes:
        tools: format of the tool calls; None if it is not known, and calls stay content.
        think: tags of the reasoning; None if the model does not reason.
        tags: see `OutputFormat`.
        hidden: special tokens, which the text omits by default.
        special_tokens: the tokenizer's special tokens, for grammars.
    """

    tools: ToolFormat | None
    think: ThinkTags | None
    tags: Tags
    hidden: frozenset[str]
    special_tokens: SpecialTokens

    @property
    def reasons(self) -> bool:
        """See `OutputFormat`."""
        return self.think is not None

    @property
    def prompt_tokens(self) -> int:
        """See `OutputFormat`."""
        return 0 if self.think is None else 24

    def start(self, tail: str, continued: str | None) -> Thinking:
        """See `OutputFormat`."""
        return "outside" if self.think is None else self.think.thinking(tail, continued)

    def shows_special_tokens(self, tools: bool) -> bool:
        """See `OutputFormat`."""
        think = self.think
        return tools or (think is not None and bool({think.begin, think.end} & self.hidden))

    def parser(self, start: str, functions: Functions) -> TaggedParser:
        """See `OutputFormat`."""
        sign = self.tags.sign
        think = calls = None
        if self.think is not None:
            begin, end = sign(self.think.begin), sign(self.think.end)
            signed = dataclasses.replace(self.think, begin=begin, end=end)
            think = ThinkParser(signed, cast(Thinking, start))
        if functions and self.tools is not None:
            calls = self.tools.parser(functions, sign)
        return TaggedParser(think, calls)

    def calls_grammar(self, tools: list[Tool], *, several: bool, literal: bool) -> str:
        """See `OutputFormat`."""
        fmt = self._known_tools()
        return fmt.grammar(tools, self.special_tokens, several=several, literal=literal)

    def text_or_calls_grammar(self, tools: list[Tool], *, several: bool, literal: bool) -> str:
        """See `OutputFormat`."""
        # Text that starts with the reasoning tag is not content.
        unlike = None if self.think is None else self.think.begin
        return self._known_tools().text_or_calls_grammar(
            tools, self.special_tokens, several=several, literal=literal, unlike=unlike
        )

    def _known_tools(self) -> ToolFormat:
        if self.tools is None:
            raise InvalidRequestError(
                "the server does not know how this model writes tool calls, so it cannot force or "
                "constrain them: start it with --tool-call-parser, or leave out tool_choice, "
                "strict and parallel_tool_calls"
            )
        return self.tools

    def after_reasoning(self, constraint: Constraint, start: str, *, calls: bool) -> Constraint:
        """See `OutputFormat`."""
        if self.think is None or start == "outside":
            return constraint
        special_tokens = self.special_tokens
        begin, end = self.think.begin, self.think.end
        if start == "inside":
            rules = ["start: thought GAP @body", special_tokens.anything_up_to("thought", end)]
        elif special_tokens.is_special(begin):
            rules = [
                "start: (opened thought GAP)? @body",
                f"opened: GAP {special_tokens.rule(begin)}",
                special_tokens.anything_up_to("thought", end),
            ]
        else:
            before = rf"/\s*{regex_text(begin)}(.|\n)*/"
            rules = [
                "start: (thought GAP)? @body",
                special_tokens.text_up_to("thought", end, before),
            ]
        return dataclasses.replace(
            constraint, outer="\n".join((*rules, r"GAP: /\s{0,2}/", TEXT_RULE))
        )
