"""Chooses how a model's answers are read."""

from rjax.errors import InvalidConfigError
from rjax.serve.reasoning.base import OutputFormat
from rjax.serve.reasoning.harmony_format import MARKERS, HarmonyFormat
from rjax.serve.reasoning.tagged import TaggedFormat
from rjax.serve.reasoning.think import ThinkTags
from rjax.serve.tools import ToolFormat
from rjax.structured.lark import SpecialTokens
from rjax.tokenization import Tokenizer

# vLLM's names, for the same forms.
THINK_TAGS = {
    "qwen3": ThinkTags(inside_at_first=False),
    "deepseek_r1": ThinkTags(inside_at_first=True),
}
HARMONY = "openai_gptoss"
REASONING_PARSERS = (*THINK_TAGS, HARMONY)


def choose_output_format(
    reasoning_parser: str | None,
    tools: ToolFormat,
    tool_format: str,
    tokenizer: Tokenizer,
    special_tokens: SpecialTokens,
) -> OutputFormat:
    """The format of a model's answers.

    Args:
        reasoning_parser: one of ``REASONING_PARSERS``; None for a model that does not reason.
        tools: the format of its calls.
        tool_format: as the operator named it; harmony has calls of its own.
        tokenizer: of the model.
        marks: of that tokenizer.

    Raises:
        InvalidConfigError: an unknown name, or a model that it does not fit.
    """
    added = tokenizer.hf.added_tokens_decoder
    special = frozenset(token.content for token in added.values() if token.special)
    if reasoning_parser is None or reasoning_parser in THINK_TAGS:
        think = None if reasoning_parser is None else THINK_TAGS[reasoning_parser]
        return TaggedFormat(tools=tools, think=think, hidden=special, special_tokens=special_tokens)
    if reasoning_parser != HARMONY:
        raise InvalidConfigError(
            f"the reasoning parser is {reasoning_parser!r}; choose one of "
            f"{', '.join(REASONING_PARSERS)}"
        )
    missing = [marker for marker in MARKERS if marker not in special]
    if missing:
        raise InvalidConfigError(
            f"the reasoning parser {HARMONY} needs the special tokens {', '.join(missing)}, which "
            "the model's tokenizer does not have; choose another parser"
        )
    if tool_format != "auto":
        raise InvalidConfigError(
            f"the reasoning parser {HARMONY} reads tool calls itself; leave out the tool format "
            f"{tool_format}"
        )
    return HarmonyFormat()
