"""Granite 3: a list of JSON objects after a tag."""

from rjax.serve.parsing.tools.base import NAME
from rjax.serve.parsing.tools.json_calls import JsonFormat

_TAG = "<|tool_call|>"
FORMATS = (
    JsonFormat(
        name="granite",
        markers=(r"<\|tool_call\|>", r"<\|start_of_role\|>"),
        begin=f"{_TAG}[",
        end="]",
        joint=", ",
        separators=",",
        opening=(_TAG, "["),
        last="]",
        tags=(_TAG,),
        head=f'{{"name": "{NAME}", "arguments": ',
        tail="}",
    ),
)
