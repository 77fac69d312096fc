"""The harmony format as an `OutputFormat`: start states and grammars."""

import dataclasses
from collections.abc import Mapping

from rjax.serve.parsing.harmony import (
    CHANNEL,
    CONSTRAIN,
    END,
    FUNCTIONS,
    MESSAGE,
    START,
    TAGS,
    HarmonyParser,
)
from rjax.serve.parsing.tags import Tags
from rjax.serve.parsing.tools.arguments import arguments_rule
from rjax.serve.parsing.tools.base import Functions
from rjax.serve.protocol.requests import Tool
from rjax.structured.constraint import Constraint
from rjax.structured.lark import TEXT_RULE, quoted

_FIRST = f"{START}assistant"
_FINAL = f"{START}assistant{CHANNEL}final{MESSAGE}"
_THOUGHT = f'thought: {CHANNEL} "analysis" {MESSAGE} TEXT {END} {START} "assistant"'
MARKERS = (START, CHANNEL, MESSAGE, END, CONSTRAIN)


def harmony_tags(ids: Mapping[str, int]) -> Tags:
    """The tags of the harmony format, with the token ids of a tokenizer."""
    return Tags(TAGS, ids)


@dataclasses.dataclass(frozen=True, slots=True)
class HarmonyFormat:
    """The harmony format of gpt-oss, with the channels analysis, commentary and final. The start
    state is the part of the first message's header that the prompt contains.

    Attributes:
        tags: see `OutputFormat`; all of `MARKERS` are tokens.
    """

    tags: Tags
    reasons: bool = True
    prompt_tokens: int = 24

    def start(self, tail: str, continued: str | None) -> str:
        """See `OutputFormat`."""
        if continued is not None:
            return _FINAL
        _, sign, header = tail.rpartition(START)
        if not sign:
            return _FIRST
        if END in header:
            return ""
        head, sign, _ = header.partition(MESSAGE)
        return START + head + sign

    def shows_special_tokens(self, tools: bool) -> bool:
        """See `OutputFormat`."""
        return True

    def parser(self, start: str, functions: Functions) -> HarmonyParser:
        """See `OutputFormat`."""
        return HarmonyParser(self.tags.sign(start), functions)

    def calls_grammar(self, tools: list[Tool], *, several: bool, literal: bool) -> str:
        """See `OutputFormat`. In this format the first call ends the turn."""
        rules = ["start: call", *_call_rules(tools, strict=True, literal=literal)]
        return "\n".join(rules)

    def text_or_calls_grammar(self, tools: list[Tool], *, several: bool, literal: bool) -> str:
        """See `OutputFormat`."""
        rules = [
            "start: (preamble thought*)* (call | final)",
            f'preamble: {CHANNEL} "commentary" {MESSAGE} TEXT {END} {START} "assistant"',
            f'final: {CHANNEL} "final" {MESSAGE} TEXT',
            _THOUGHT,
            *_call_rules(tools, strict=False, literal=literal),
            TEXT_RULE,
        ]
        return "\n".join(rules)

    def after_reasoning(self, constraint: Constraint, start: str, *, calls: bool) -> Constraint:
        """See `OutputFormat`."""
        if start.endswith(MESSAGE) and "analysis" not in start:
            return constraint  # the prompt has opened the final message
        lead = {_FIRST: "", "": f'{START} "assistant"'}.get(start)
        if lead is None:
            lead = f'TEXT {END} {START} "assistant"'
        header = "" if calls else f'{CHANNEL} "final" {MESSAGE}'
        outer = "\n".join((f"start: {lead} thought* {header} @body", _THOUGHT, TEXT_RULE))
        return dataclasses.replace(constraint, outer=outer)


def _call_rules(tools: list[Tool], *, strict: bool, literal: bool) -> list[str]:
    """The rule ``call`` of a call of one of these functions, and its parts."""
    rules = [f"call: {CHANNEL} (" + " | ".join(f"call_{i}" for i in range(len(tools))) + ")"]
    for i, tool in enumerate(tools):
        head = quoted(f"commentary to={FUNCTIONS}{tool.function.name} ")
        rules.append(f'call_{i}: {head} {CONSTRAIN} "json" {MESSAGE} arguments_{i}')
        rules.append(f"arguments_{i}: {arguments_rule(tool, strict=strict, literal=literal)}")
    return rules
