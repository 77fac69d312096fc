"""Formats of tool calls and their grammars."""

import dataclasses
import json

from rjax.errors import InvalidConfigError
from rjax.serve.requests import Tool
from rjax.serve.tools.arguments import arguments_rule
from rjax.structured.lark import TEXT_RULE, SpecialTokens, quoted, regex_text
from rjax.tokenization import Tokenizer

PYTHON_TAG = "<|python_tag|>"  # Llama's, before calls


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """How a model writes tool calls.

    Attributes:
        name: as of vLLM's ``--tool-call-parser``.
        begin, end: text before and after the JSON of a call.
        arguments: JSON key of the arguments; the key of the function's name is "name".
        separator: between two calls.
        anywhere: whether text may precede a call. If not, an output contains calls only if it
            starts with ``begin`` or with a JSON object.
    """

    name: str
    begin: str
    end: str
    arguments: str
    separator: str
    anywhere: bool

    def tags(self) -> tuple[str, ...]:
        """The texts around calls, which are tokens of many models."""
        return tuple(filter(None, (self.begin.strip(), self.end.strip(), PYTHON_TAG)))

    def call_text(self, name: str, arguments: str) -> str:
        """A call as the model would write it."""
        return f"{self.begin}{self._object(name, arguments)}{self.end}"

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
            special_tokens: of the tokenizer.
            several: whether more than one call is allowed.
            literal: as in `rjax.structured.schemas.generation_schema`.
        """
        again = f" ({quoted(self.separator)} one)*" if several else ""
        rules = [
            f"start: one{again}",
            f"one: {special_tokens.rule(self.begin)} call {special_tokens.rule(self.end)}",
        ]
        return "\n".join(rules + self._call_rules(tools, strict=True, literal=literal))

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

        The arguments of strict functions match their schemas; those of others are any object.

        Args:
            tools: the functions.
            special_tokens: of the tokenizer.
            several: whether more than one call is allowed.
            literal: as in `rjax.structured.schemas.generation_schema`.
            unlike: a marker with which the text must not start.
        """
        others = [mark for mark in (unlike,) if mark is not None]
        if self.anywhere:
            begin = self.begin.strip()
            one = f"{quoted(self.begin.removeprefix(begin))} call {special_tokens.rule(self.end)}"
            more = f"(lead {one})* TEXT" if several else ""
            rules = [
                f"start: PLAIN | first {one} {more}",
                special_tokens.text_up_to("first", begin, "PLAIN"),
                TEXT_RULE,
            ]
            if several:
                rules.append(special_tokens.text_up_to("lead", begin))
            plain = r"/(.|\n)*/"
        else:
            others.append(PYTHON_TAG)
            more = f"({quoted(self.separator)} call)*" if several else ""
            rules = [f"start: PLAIN | ({special_tokens.rule(PYTHON_TAG)})? call {more}"]
            plain = r"/\s*([^\s{](.|\n)*)?/"
        for mark in others:
            if not special_tokens.is_special(mark):  # text never matches special tokens
                plain += rf" & ~/\s*{regex_text(mark)}(.|\n)*/"
        rules.append(f"PLAIN: {plain}")
        return "\n".join(rules + self._call_rules(tools, strict=False, literal=literal))

    def _call_rules(self, tools: list[Tool], *, strict: bool, literal: bool) -> list[str]:
        """The rule ``call``: the JSON of a call of one of these functions."""
        rules = ["call: " + " | ".join(f"call_{i}" for i in range(len(tools)))]
        for i, tool in enumerate(tools):
            head, tail = self._object(tool.function.name, "\0").split("\0")
            rules.append(f"call_{i}: {quoted(head)} arguments_{i} {quoted(tail)}")
            rules.append(f"arguments_{i}: {arguments_rule(tool, strict=strict, literal=literal)}")
        return rules

    def _object(self, name: str, arguments: str) -> str:
        return f'{{"name": {json.dumps(name)}, "{self.arguments}": {arguments}}}'


HERMES = ToolFormat(
    name="hermes",
    begin="<tool_call>\n",
    end="\n</tool_call>",
    arguments="arguments",
    separator="\n",
    anywhere=True,
)
LLAMA3 = ToolFormat(
    name="llama3_json",
    begin="",
    end="",
    arguments="parameters",
    separator="; ",
    anywhere=False,
)
TOOL_FORMATS = {fmt.name: fmt for fmt in (HERMES, LLAMA3)}


def choose_tool_format(name: str, tokenizer: Tokenizer) -> ToolFormat:
    """The format of this name; "auto" selects Llama's if the template contains Llama's tags.

    Raises:
        InvalidConfigError: an unknown name.
    """
    if name == "auto":
        template = str(tokenizer.hf.chat_template or "")
        llama = "<|python_tag|>" in template or "<|start_header_id|>" in template
        return LLAMA3 if llama else HERMES
    if name not in TOOL_FORMATS:
        raise InvalidConfigError(
            f"the tool call parser is {name!r}; choose one of auto, {', '.join(TOOL_FORMATS)}"
        )
    return TOOL_FORMATS[name]
