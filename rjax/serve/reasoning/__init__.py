"""Output formats: parsers of reasoning, content and tool calls, and constraints on them."""

from rjax.serve.reasoning.base import OutputDelta, OutputFormat, OutputParser
from rjax.serve.reasoning.registry import REASONING_PARSERS, choose_output_format
from rjax.serve.reasoning.tokens import ReasoningTokens

__all__ = [
    "REASONING_PARSERS",
    "OutputDelta",
    "OutputFormat",
    "OutputParser",
    "ReasoningTokens",
    "choose_output_format",
]
