"""Tool calls: showing functions to a model, and reading its calls."""

from rjax.serve.tools.formats import PYTHON_TAG, TOOL_FORMATS, ToolFormat, choose_tool_format
from rjax.serve.tools.parser import CallDelta, ToolCallParser, join_call_deltas, new_call_id
from rjax.serve.tools.prompt import conversation, message_text, tools_for_template

__all__ = [
    "PYTHON_TAG",
    "TOOL_FORMATS",
    "CallDelta",
    "ToolCallParser",
    "ToolFormat",
    "choose_tool_format",
    "conversation",
    "join_call_deltas",
    "message_text",
    "new_call_id",
    "tools_for_template",
]
