"""Mistral: a list of JSON objects after a tag, or since 2025 a name and JSON after each tag."""

from rjax.serve.parsing.tools.base import NAME
from rjax.serve.parsing.tools.json_calls import JsonFormat

_TAG, _ARGS = "[TOOL_CALLS]", "[ARGS]"
FORMATS = (
    JsonFormat(
        name="mistral",
        markers=(r"\[TOOL_CALLS\] ?\[",),
        absent=(r"\[ARGS\]",),
        begin=f"{_TAG} [",
        end="]",
        joint=", ",
        separators=",",
        opening=(_TAG, "["),
        last="]",
        tags=(_TAG,),
        head=f'{{"name": "{NAME}", "arguments": ',
        tail="}",
        more=r'(", \"id\": \"" /[a-zA-Z0-9]{9}/ "\"")?',
    ),
    JsonFormat(
        name="mistral_v13",
        variant_of="mistral",
        markers=(r"\[TOOL_CALLS\]", r"\[ARGS\]"),
        begin=_TAG,
        opening=(_TAG,),
        tags=(_TAG, _ARGS),
        head=f"{NAME}{_ARGS}",
    ),
)
