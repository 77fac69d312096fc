"""Llama 3.1 to 4: JSON objects without tags, with the key "parameters"."""

import dataclasses

from rjax.serve.parsing.tools.base import NAME
from rjax.serve.parsing.tools.json_calls import JsonFormat

PYTHON_TAG = "<|python_tag|>"  # before calls, in some outputs
_PYTHONIC = r"\[func_name1\("
_LLAMA3 = JsonFormat(
    name="llama3_json",
    markers=(r"<\|start_header_id\|>", '"name":', '"parameters":'),
    absent=(_PYTHONIC, '"arguments":'),
    joint="; ",
    separators=";,",
    tags=(PYTHON_TAG,),
    anywhere=False,
    first="{",
    lead=PYTHON_TAG,
    head=f'{{"name": "{NAME}", "parameters": ',
    tail="}",
)
FORMATS = (
    _LLAMA3,
    dataclasses.replace(
        _LLAMA3,
        name="llama4_json",
        markers=(r"<\|header_start\|>", *_LLAMA3.markers[1:]),
    ),
)
