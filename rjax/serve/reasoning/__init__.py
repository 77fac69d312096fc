"""Reasoning, content and tool calls: the parts of an answer, and the constraints on them."""

from rjax.serve.reasoning.base import AnswerFormat, AnswerPiece, AnswerReader
from rjax.serve.reasoning.choice import REASONING_PARSERS, answer_format
from rjax.serve.reasoning.tokens import ReasoningTokens

__all__ = [
    "REASONING_PARSERS",
    "AnswerFormat",
    "AnswerPiece",
    "AnswerReader",
    "ReasoningTokens",
    "answer_format",
]
