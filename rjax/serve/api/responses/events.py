"""The server-sent events of a response's stream, composed from text.

The data of an event is the JSON of its model in `rjax.serve.protocol.responses_api_models`, byte
for byte; tests hold it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from rjax.serve.api.chunks import json_string, json_text
from rjax.serve.http.chunked_json import iter_json
from rjax.serve.protocol.responses_api_models import (
    ResponseFunctionToolCall,
    ResponseOutputItem,
    ResponseOutputMessage,
    ResponseOutputText,
    ResponseReasoningText,
)

_END = "}\n\n"
_TEXT_END = ',"logprobs":[]}\n\n'


def models_json(value: BaseModel | Sequence[BaseModel], *, large: bool) -> str:
    """The JSON of models. Large ones are encoded in pieces, so that other threads can run."""
    return "".join(iter_json(value)) if large else json_text(value)


class ResponseEvents:
    """Composes the events of one response and numbers them."""

    def __init__(self) -> None:
        self._events: list[str] = []
        self._number = 0
        self._place = ""  # fields that name the open item, or its part
        self._delta_head = ""  # a delta of the open item up to its number
        self._delta_place = ""  # and from there to its text
        self._delta_end = ""

    def take(self) -> list[str]:
        """The events since the last call."""
        taken, self._events = self._events, []
        return taken

    def response(self, status: str, response: str) -> None:
        """Add the event of a start or an end of the response, whose JSON is given."""
        self._add(f"response.{status}", f'"response":{response}')

    def open(self, index: int, item: ResponseOutputItem) -> None:
        """Add the events that begin an item and, in a message or reasoning, its part.

        Args:
            index: index of the item in the output.
            item: the item, without content.
        """
        added = f'"output_index":{index},"item":{json_text(item)}'
        self._add("response.output_item.added", added)
        self._place = f'"item_id":{json_string(item.id)},"output_index":{index}'
        self._delta_end = _END
        if isinstance(item, ResponseFunctionToolCall):
            kind = "response.function_call_arguments.delta"
        else:
            self._place += ',"content_index":0'
            if isinstance(item, ResponseOutputMessage):
                kind, part = "response.output_text.delta", ResponseOutputText(text="")
                self._delta_end = _TEXT_END
            else:
                kind, part = "response.reasoning_text.delta", ResponseReasoningText(text="")
            self._add_here("response.content_part.added", f'"part":{json_text(part)}')
        self._delta_head = f'event: {kind}\ndata: {{"type":"{kind}","sequence_number":'
        self._delta_place = f',{self._place},"delta":'

    def delta(self, text: str, logprobs: Sequence[Mapping[str, Any]] = ()) -> None:
        """Add the event of new text or arguments of the open item.

        Args:
            text: the new text or arguments.
            logprobs: fields of `TextLogprob` for the tokens of the text; only for a message.
        """
        end = f',"logprobs":{json_text(logprobs)}}}\n\n' if logprobs else self._delta_end
        self._events.append(
            f"{self._delta_head}{self._number}{self._delta_place}{json_string(text)}{end}"
        )
        self._number += 1

    def close(self, index: int, item: ResponseOutputItem, *, large: bool) -> None:
        """Add the events that complete the open item.

        Args:
            index: index of the item in the output.
            item: the item, with its content.
            large: the item is large, so that other threads must run in between.
        """
        if isinstance(item, ResponseFunctionToolCall):
            whole = f'"name":{json_string(item.name)},"arguments":{json_string(item.arguments)}'
            self._add_here("response.function_call_arguments.done", whole)
        else:
            (part,) = item.content
            whole = f'"text":{json_string(part.text)}'
            if isinstance(part, ResponseOutputText):
                whole += f',"logprobs":{models_json(part.logprobs, large=large)}'
            self._add_here(f"response.{part.type}.done", whole)
            self._add_here("response.content_part.done", f'"part":{models_json(part, large=large)}')
        done = f'"output_index":{index},"item":{models_json(item, large=large)}'
        self._add("response.output_item.done", done)

    def _add_here(self, kind: str, fields: str) -> None:
        """Add an event of the open item or of its part."""
        self._add(kind, f"{self._place},{fields}")

    def _add(self, kind: str, fields: str) -> None:
        head = f'event: {kind}\ndata: {{"type":"{kind}","sequence_number":{self._number}'
        self._events.append(f"{head},{fields}{_END}")
        self._number += 1
