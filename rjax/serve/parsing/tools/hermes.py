"""Hermes 2 and 3, Qwen 2.5 and 3, Granite 4 and others: a JSON object between tags."""

from rjax.serve.parsing.tools.base import NAME
from rjax.serve.parsing.tools.json_calls import JsonFormat

FORMATS = (
    JsonFormat(
        name="hermes",
        markers=("<tool_call>", '"name"', '"arguments"'),
        absent=("<function=", "<arg_key>"),
        begin="<tool_call>\n",
        end="\n</tool_call>",
        separator="\n",
        opening=("<tool_call>",),
        closing="</tool_call>",
        tags=("<tool_call>", "</tool_call>"),
        head=f'{{"name": "{NAME}", "arguments": ',
        tail="}",
    ),
)
