"""DeepSeek V3, R1 and V3.1: names and JSON arguments between tags, in a section of calls."""
# ruff: noqa: RUF001 (the tags have full-width bars)

from rjax.serve.parsing.tools.base import NAME
from rjax.serve.parsing.tools.json_calls import JsonFormat

_CALLS, _CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _CALL_END, _SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
_TAGS = (_CALLS, _CALLS_END, _CALL, _CALL_END, _SEP)
FORMATS = (
    JsonFormat(
        name="deepseek_v3",
        markers=(_CALL, _SEP, "```json"),
        begin=_CALLS + _CALL,
        end=_CALL_END + _CALLS_END,
        joint=f"{_CALL_END}\n{_CALL}",
        opening=(_CALLS, _CALL),
        again=_CALL,
        closing=f"```{_CALL_END}",
        last=_CALLS_END,
        tags=_TAGS,
        head=f"function{_SEP}{NAME}\n```json\n",
        tail="\n```",
    ),
    JsonFormat(
        name="deepseek_v31",
        markers=(_CALL, _SEP),
        absent=("```json",),
        begin=_CALLS + _CALL,
        end=_CALL_END + _CALLS_END,
        joint=_CALL_END + _CALL,
        opening=(_CALLS, _CALL),
        again=_CALL,
        closing=_CALL_END,
        last=_CALLS_END,
        tags=_TAGS,
        head=f"{NAME}{_SEP}",
    ),
)
