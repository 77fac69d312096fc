"""Converts the deltas of a chat to output items and stream events of a response."""

import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rjax.serve.api.chat_parts import ChatDelta
from rjax.serve.parsing.tools.parser import CallDelta
from rjax.serve.protocol.errors import ApiError
from rjax.serve.protocol.responses import ChatFinishReason
from rjax.serve.protocol.responses_api_models import (
    ArgumentsDeltaEvent,
    ArgumentsDoneEvent,
    IncompleteDetails,
    InputTokensDetails,
    ItemEvent,
    OutputTokensDetails,
    PartEvent,
    ReasoningDeltaEvent,
    ReasoningDoneEvent,
    ResponseError,
    ResponseEvent,
    ResponseFunctionToolCall,
    ResponseOutputItem,
    ResponseOutputMessage,
    ResponseOutputText,
    ResponseReasoningItem,
    ResponseReasoningText,
    ResponsesResponse,
    ResponseUsage,
    StreamEvent,
    TextDeltaEvent,
    TextDoneEvent,
    TextLogprob,
)
from rjax.serve.protocol.responses_api_requests import Status

_FAILURES = {400: "invalid_prompt", 503: "rate_limit_exceeded"}


class ResponseWriter:
    """Writes one response.

    Reasoning, text and each tool call become separate items. White space before a call, or alone
    after a call or reasoning, is dropped, as in a chat response.

    Args:
        response: a new response without output.
    """

    def __init__(self, response: ResponsesResponse) -> None:
        self.response = response
        self.size = 0
        """Number of logprobs, including alternatives; they dominate the size of an event."""
        self._events: list[StreamEvent] = []
        self._number = 0
        self._done: list[ResponseOutputItem] = []
        self._item: ResponseOutputItem | None = None  # the open item, without its content
        self._call_index: int | None = None
        self._pieces: list[str] = []  # of the open item's text or arguments
        self._logprobs: list[TextLogprob] = []
        self._held = ""  # leading white space, dropped if no text follows

    def begin(self) -> list[StreamEvent]:
        """The first events."""
        for name in ("response.created", "response.in_progress"):
            self._emit(ResponseEvent, name, response=self.response)
        return self._take()

    def feed(self, delta: ChatDelta) -> list[StreamEvent]:
        """The events of a delta."""
        if delta.reasoning:
            self._reasoning(delta.reasoning)
        logprobs = () if delta.logprobs is None else delta.logprobs["content"]
        if delta.content or logprobs:
            self._text(delta.content, [TextLogprob.model_validate(entry) for entry in logprobs])
        if delta.call is not None:
            self._call(delta.call)
        return self._take()

    def finish(self, reason: ChatFinishReason, usage: Mapping[str, Any]) -> list[StreamEvent]:
        """Complete the response; return the last events.

        Args:
            reason: finish reason of the chat.
            usage: the fields of `UsageInfo`, of the chat.
        """
        response = self.response
        response.usage = _usage(usage)
        if reason in ("abort", "error"):
            message = "the request took longer than this server allows"
            return self.fail(ApiError(500, message))
        if not self._done and self._item is None:
            self._begin_text(self._held)
        cut = reason == "length"
        self._close("incomplete" if cut else "completed")
        response.output = self._done
        response.status = "incomplete" if cut else "completed"
        if cut:
            response.incomplete_details = IncompleteDetails(reason="max_output_tokens")
        response.completed_at = int(time.time())
        self._emit(ResponseEvent, f"response.{response.status}", response=response)
        return self._take()

    def cancel(self) -> None:
        """End the response with the items so far."""
        if self._item is not None:
            self._done.append(self._whole_item("incomplete"))
        self.response.output = self._done
        self.response.status = "cancelled"

    def fail(self, error: ApiError) -> list[StreamEvent]:
        """End the response with an error; return the last event."""
        response = self.response
        if self._item is not None:
            self._done.append(self._whole_item("incomplete"))
        response.output = self._done
        response.status = "failed"
        response.error = ResponseError.model_validate(
            {"code": _FAILURES.get(error.status, "server_error"), "message": error.message}
        )
        self._emit(ResponseEvent, "response.failed", response=response)
        return self._take()

    def _reasoning(self, text: str) -> None:
        if not isinstance(self._item, ResponseReasoningItem):
            self._close("completed")
            name = f"rs_{secrets.token_hex(12)}"
            self._open(ResponseReasoningItem(id=name, status="in_progress", content=[]))
            part = ResponseReasoningText(text="")
            self._emit_for_item(PartEvent, "response.content_part.added", part=part)
        self._pieces.append(text)
        self._emit_for_item(ReasoningDeltaEvent, "response.reasoning_text.delta", delta=text)

    def _text(self, text: str, logprobs: list[TextLogprob]) -> None:
        if not isinstance(self._item, ResponseOutputMessage):
            self._held += text
            if not self._held.strip() and not logprobs:
                return
            self._close("completed")
            self._begin_text(self._held, logprobs)
        else:
            self._add_text(text, logprobs)

    def _begin_text(self, text: str, logprobs: Sequence[TextLogprob] = ()) -> None:
        name = f"msg_{secrets.token_hex(12)}"
        self._open(ResponseOutputMessage(id=name, status="in_progress", content=[]))
        self._emit_for_item(
            PartEvent, "response.content_part.added", part=ResponseOutputText(text="")
        )
        if text or logprobs:
            self._add_text(text, logprobs)

    def _add_text(self, text: str, logprobs: Sequence[TextLogprob]) -> None:
        self._pieces.append(text)
        self._logprobs += logprobs
        self.size += sum(1 + len(entry.top_logprobs) for entry in logprobs)
        name = "response.output_text.delta"
        self._emit_for_item(TextDeltaEvent, name, delta=text, logprobs=list(logprobs))

    def _call(self, piece: CallDelta) -> None:
        if piece.index != self._call_index:
            self._close("completed")
            self._call_index = piece.index
            assert piece.id is not None
            assert piece.name is not None
            self._open(
                ResponseFunctionToolCall(
                    id=f"fc_{secrets.token_hex(12)}",
                    call_id=piece.id,
                    name=piece.name,
                    arguments="",
                    status="in_progress",
                )
            )
        if piece.arguments:
            arguments = piece.arguments
            self._pieces.append(arguments)
            name = "response.function_call_arguments.delta"
            self._emit_for_item(ArgumentsDeltaEvent, name, delta=arguments)

    def _open(self, item: ResponseOutputItem) -> None:
        self._held = ""
        self._item = item
        self._emit(ItemEvent, "response.output_item.added", output_index=len(self._done), item=item)

    def _close(self, status: Status) -> None:
        """Complete the open item, if there is one."""
        if self._item is None:
            return
        item = self._whole_item(status)
        if isinstance(item, ResponseOutputMessage):
            (part,) = item.content
            name = "response.output_text.done"
            self._emit_for_item(TextDoneEvent, name, text=part.text, logprobs=part.logprobs)
            self._emit_for_item(PartEvent, "response.content_part.done", part=part)
        elif isinstance(item, ResponseReasoningItem):
            (part,) = item.content
            self._emit_for_item(ReasoningDoneEvent, "response.reasoning_text.done", text=part.text)
            self._emit_for_item(PartEvent, "response.content_part.done", part=part)
        else:
            name = "response.function_call_arguments.done"
            self._emit_for_item(ArgumentsDoneEvent, name, name=item.name, arguments=item.arguments)
        self._emit(ItemEvent, "response.output_item.done", output_index=len(self._done), item=item)
        self._done.append(item)
        self._item, self._pieces, self._logprobs = None, [], []

    def _whole_item(self, status: Status) -> ResponseOutputItem:
        """The open item with its content so far."""
        whole = "".join(self._pieces)
        if isinstance(self._item, ResponseOutputMessage):
            part = ResponseOutputText(text=whole, logprobs=self._logprobs)
            return self._item.model_copy(update={"status": status, "content": [part]})
        if isinstance(self._item, ResponseReasoningItem):
            part = ResponseReasoningText(text=whole)
            return self._item.model_copy(update={"status": status, "content": [part]})
        assert self._item is not None
        return self._item.model_copy(update={"status": status, "arguments": whole})

    def _emit_for_item(self, kind: type[StreamEvent], type_: str, **fields: object) -> None:
        assert self._item is not None
        place = {"item_id": self._item.id, "output_index": len(self._done)}
        self._emit(kind, type_, **place, **fields)

    def _emit(self, kind: type[StreamEvent], type_: str, **fields: object) -> None:
        event = kind.model_validate({"type": type_, "sequence_number": self._number, **fields})
        self._events.append(event)
        self._number += 1

    def _take(self) -> list[StreamEvent]:
        found, self._events = self._events, []
        return found


def _usage(usage: Mapping[str, Any]) -> ResponseUsage:
    prompt, generated = usage["prompt_tokens"], usage["completion_tokens"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    reasoning = usage["completion_tokens_details"]["reasoning_tokens"]
    return ResponseUsage(
        input_tokens=prompt,
        input_tokens_details=InputTokensDetails(
            cached_tokens=cached, cache_write_tokens=prompt - cached
        ),
        output_tokens=generated,
        output_tokens_details=OutputTokensDetails(reasoning_tokens=reasoning),
        total_tokens=prompt + generated,
    )
