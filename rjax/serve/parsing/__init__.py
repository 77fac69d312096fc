"""Output formats: parsers of reasoning, content and tool calls, and constraints on them."""

from rjax.serve.parsing.base import OutputDelta, OutputFormat, OutputParser
from rjax.serve.parsing.reader import OutputReader
from rjax.serve.parsing.registry import REASONING_PARSERS, choose_output_format

__all__ = [
    "REASONING_PARSERS",
    "OutputDelta",
    "OutputFormat",
    "OutputParser",
    "OutputReader",
    "choose_output_format",
]
