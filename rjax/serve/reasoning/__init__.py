"""Output formats: parsers of reasoning, content and tool calls, and constraints on them."""

from rjax.serve.reasoning.base import OutputDelta, OutputFormat, OutputParser
from rjax.serve.reasoning.reader import OutputReader
from rjax.serve.reasoning.registry import REASONING_PARSERS, choose_output_format

__all__ = [
    "REASONING_PARSERS",
    "OutputDelta",
    "OutputFormat",
    "OutputParser",
    "OutputReader",
    "choose_output_format",
]
