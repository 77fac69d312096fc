"""Qwen3-Coder and later Qwen models: a tag for each parameter."""

from rjax.serve.parsing.tools.base import NAME
from rjax.serve.parsing.tools.parameter_calls import ParameterFormat

FORMATS = (
    ParameterFormat(
        name="qwen3_coder",
        markers=("<tool_call>", "<function=", "<parameter="),
        begin="<tool_call>\n",
        end="\n</tool_call>",
        separator="\n",
        opening=("<tool_call>",),
        closing="</tool_call>",
        tags=("<tool_call>", "</tool_call>"),
        head=f"<function={NAME}>\n",
        tail="</function>",
        key_begin="<parameter=",
        key_end=">",
        padding="\n",
        value_end="</parameter>",
        gap="\n",
        python_words=True,
    ),
)
