"""Tool calls: showing functions to a model, and reading its calls."""

from rjax.serve.tools.formats import FORMATS, ToolFormat, choose_format
from rjax.serve.tools.prompt import conversation, message_text, tools_for_template
from rjax.serve.tools.reader import CallPiece, CallReader, join_pieces, new_call_id

__all__ = [
    "FORMATS",
    "CallPiece",
    "CallReader",
    "ToolFormat",
    "choose_format",
    "conversation",
    "join_pieces",
    "message_text",
    "new_call_id",
    "tools_for_template",
]
