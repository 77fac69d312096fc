"""GLM 4.5 and 4.6, and 4.7 without line breaks: tags for the names and values of parameters."""

import dataclasses

from rjax.serve.parsing.tools.base import NAME
from rjax.serve.parsing.tools.parameter_calls import ParameterFormat

_KEY, _KEY_END = "<arg_key>", "</arg_key>"
_VALUE, _VALUE_END = "<arg_value>", "</arg_value>"
_GLM45 = ParameterFormat(
    name="glm45",
    markers=(_KEY, rf"{_KEY_END}\s*(\\n)?\s*{_VALUE}"),
    absent=(_KEY_END + _VALUE,),
    begin="<tool_call>",
    end="</tool_call>",
    separator="\n",
    opening=("<tool_call>",),
    closing="</tool_call>",
    tags=("<tool_call>", "</tool_call>", _KEY, _KEY_END, _VALUE, _VALUE_END),
    head=f"{NAME}\n",
    key_begin=_KEY,
    key_end=f"{_KEY_END}\n{_VALUE}",
    value_end=_VALUE_END,
    gap="\n",
)
FORMATS = (
    _GLM45,
    dataclasses.replace(
        _GLM45,
        name="glm47",
        markers=(_KEY_END + _VALUE,),
        absent=(),
        head=NAME,
        key_end=_KEY_END + _VALUE,
        gap="",
        separator="",
    ),
)
