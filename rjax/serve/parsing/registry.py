"""Chooses a model's output format by the name of its reasoning parser."""

from rjax.errors import InvalidConfigError
from rjax.serve.parsing.base import OutputFormat
from rjax.serve.parsing.harmony_format import MARKERS, HarmonyFormat, harmony_tags
from rjax.serve.parsing.tagged import TaggedFormat
from rjax.serve.parsing.tags import Tags
from rjax.serve.parsing.think import ThinkTags
from rjax.serve.parsing.tools.base import ToolFormat
from rjax.structured.lark import SpecialTokens
from rjax.tokenization import Tokenizer

# The names are vLLM's.
THINK_TAGS = {
    "qwen3": ThinkTags(inside_at_first=False),
    "deepseek_r1": ThinkTags(inside_at_first=True),
    "gemma4": ThinkTags(
        begin="<|channel>", end="<channel|>", label="thought\n", inside_at_first=False
    ),
}
HARMONY = "openai_gptoss"
REASONING_PARSERS = (*THINK_TAGS, HARMONY)


def choose_output_format(
    reasoning_parser: str | None,
    tools: ToolFormat | None,
    tool_format: str,
    tokenizer: Tokenizer,
    special_tokens: SpecialTokens,
) -> OutputFormat:
    """The format of a model's outputs.

    Args:
        reasoning_parser: one of ``REASONING_PARSERS``; None for a model that does not reason.
        tools: format of its tool calls; None if it is not known.
        tool_format: "auto", or the name of a tool format; harmony has its own.
        tokenizer: the model's tokenizer.
        special_tokens: special tokens of that tokenizer.

    Raises:
        InvalidConfigError: the name is unknown, or the parser does not fit the model.
    """
    added = tokenizer.hf.added_tokens_decoder
    special = frozenset(token.content for token in added.values() if token.special)
    if reasoning_parser is None or reasoning_parser in THINK_TAGS:
        think = None if reasoning_parser is None else THINK_TAGS[reasoning_parser]
        own = () if think is None else (think.begin, think.end)
        return TaggedFormat(
            tools=tools,
            think=think,
            tags=Tags((*own, *(tools.tags if tools else ())), special_tokens.special),
            hidden=special,
            special_tokens=special_tokens,
        )
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
            f"the reasoning parser {HARMONY} reads tool calls itself; leave out the tool call "
            f"parser {tool_format}"
        )
    return HarmonyFormat(harmony_tags({token.content: i for i, token in added.items()}))
