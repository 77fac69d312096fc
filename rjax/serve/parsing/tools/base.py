"""The contract of a tool-call format, and the grammars that all formats share."""

import abc
import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rjax.serve.parsing.tools.parser import CallTags, ToolCallParser
from rjax.serve.protocol.requests import Tool
from rjax.structured.lark import TEXT_RULE, SpecialTokens, quoted, regex_text

type Functions = Mapping[str, dict[str, Any] | None]
"""JSON schemas of the parameters of the functions that may be called, by their names."""

NAME = "\0"  # the function's name in a format's texts


def functions(tools: Sequence[Tool]) -> Functions:
    """The functions of a request."""
    return {tool.function.name: tool.function.parameters for tool in tools}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToolFormat(CallTags, abc.ABC):
    """How a model family writes tool calls.

    The texts are those of the chat template; `CallTags` are their parts that a parser looks for,
    with any white space between them.

    Attributes:
        name: the format's name, as in vLLM's ``--tool-call-parser``.
        variant_of: a name that also selects this format, if the template has its markers.
        markers: regular expressions; a template that matches all is one of this family.
        absent: regular expressions; a template that matches one is of another family.
        begin, end: texts around a run.
        separator: text between runs.
        tags: all texts that are tokens of the family's tokenizers.
    """

    name: str
    variant_of: str = ""
    markers: tuple[str, ...]
    absent: tuple[str, ...] = ()
    begin: str = ""
    end: str = ""
    separator: str = ""
    tags: tuple[str, ...] = ()

    @abc.abstractmethod
    def parser(self, functions: Functions, sign: Callable[[str], str]) -> ToolCallParser:
        """A parser of one output.

        Args:
            functions: functions that may be called.
            sign: replaces tags in a text by their signs; see `rjax.serve.parsing.tags`.
        """

    @abc.abstractmethod
    def one_call(self, name: str, arguments: str) -> str:
        """A call as the template writes it, without the texts around a run.

        Raises:
            InvalidRequestError: the format cannot write these arguments.
        """

    @abc.abstractmethod
    def call_rules(
        self, i: int, tool: Tool, special_tokens: SpecialTokens, *, strict: bool, literal: bool
    ) -> list[str]:
        """Lark rules of ``call_{i}``, a call of this function; other names end with ``_{i}`` too.

        Args:
            i: index of the function.
            tool: the function.
            special_tokens: the tokenizer's special tokens.
            strict: enforce the schema even if the function is not ``strict``.
            literal: do not close objects; see `rjax.structured.schemas.generation_schema`.

        Raises:
            InvalidRequestError: the grammar cannot express the function's schema.
        """

    @property
    def example(self) -> str:
        """A call that shows the form to a model."""
        return self.call_text("function-name", "{...}")

    def fits(self, template: str) -> bool:
        """Whether a chat template writes calls in this format."""
        return all(re.search(marker, template) for marker in self.markers) and not any(
            re.search(marker, template) for marker in self.absent
        )

    def call_text(self, name: str, arguments: str) -> str:
        """An output with one call; see `calls_text`."""
        return self.calls_text([(name, arguments)])

    def calls_text(self, calls: Sequence[tuple[str, str]]) -> str:
        """An output with these calls, as the template writes them.

        Args:
            calls: function names, and arguments as JSON.
        """
        texts = [self.one_call(*call) for call in calls]
        if self.joint is None:
            return self.separator.join(f"{self.begin}{text}{self.end}" for text in texts)
        return f"{self.begin}{self.joint.join(texts)}{self.end}"

    def grammar(
        self,
        tools: list[Tool],
        special_tokens: SpecialTokens,
        *,
        several: bool,
        literal: bool = False,
    ) -> str:
        """A Lark grammar of calls of these functions, with arguments that match their schemas.

        Args:
            tools: the functions.
            special_tokens: the tokenizer's special tokens.
            several: whether more than one call is allowed.
            literal: do not close objects; see `rjax.structured.schemas.generation_schema`.
        """
        begin, end = special_tokens.rule(self.begin), special_tokens.rule(self.end)
        run = f"{begin} {self._calls(special_tokens, several)} {end}"
        again = several and self.joint is None
        rules = [f"start: run ({quoted(self.separator)} run)*" if again else "start: run"]
        rules.append(f"run: {run}")
        return "\n".join(rules + self._rules(tools, special_tokens, strict=True, literal=literal))

    def text_or_calls_grammar(
        self,
        tools: list[Tool],
        special_tokens: SpecialTokens,
        *,
        several: bool,
        literal: bool = False,
        unlike: str | None = None,
    ) -> str:
        """A Lark grammar of text with optional calls of these functions.

        The arguments of strict functions match their schemas; those of other functions are any
        object.

        Args:
            tools: the functions.
            special_tokens: the tokenizer's special tokens.
            several: whether more than one call is allowed.
            literal: do not close objects; see `rjax.structured.schemas.generation_schema`.
            unlike: a marker with which the text must not start.
        """
        calls = self._calls(special_tokens, several)
        end = special_tokens.rule(self.end)
        others = [mark for mark in (unlike, self.lead) if mark]
        if self.anywhere:
            tag = self.opening[0]
            one = f"{special_tokens.rule(self.begin.removeprefix(tag))} {calls} {end}"
            more = f"(before {one})* TEXT" if several else ""
            rules = [
                f"start: PLAIN | first {one} {more}",
                special_tokens.text_up_to("first", tag, "PLAIN"),
                TEXT_RULE,
            ]
            if several:
                rules.append(special_tokens.text_up_to("before", tag))
            plain = r"/(.|\n)*/"
        else:
            lead = f"({special_tokens.rule(self.lead)})?" if self.lead else ""
            rules = [f"start: PLAIN | {lead} {quoted(self.begin)} {calls} {end}"]
            plain = rf"/\s*([^\s\{self.first}](.|\n)*)?/"
        for mark in others:
            if not special_tokens.is_special(mark):  # text never matches special tokens
                plain += rf" & ~/\s*{regex_text(mark)}(.|\n)*/"
        rules.append(f"PLAIN: {plain}")
        return "\n".join(rules + self._rules(tools, special_tokens, strict=False, literal=literal))

    def shared_rules(self) -> list[str]:
        """Lark rules that the calls of all functions use."""
        return []

    def _calls(self, special_tokens: SpecialTokens, several: bool) -> str:
        """The calls of a run."""
        if self.joint is None or not several:
            return "call"
        return f"call ({special_tokens.rule(self.joint)} call)*"

    def _rules(
        self, tools: list[Tool], special_tokens: SpecialTokens, *, strict: bool, literal: bool
    ) -> list[str]:
        """The rule ``call``: a call of one of these functions."""
        rules = ["call: " + " | ".join(f"call_{i}" for i in range(len(tools)))]
        rules += self.shared_rules()
        for i, tool in enumerate(tools):
            rules += self.call_rules(i, tool, special_tokens, strict=strict, literal=literal)
        return rules
