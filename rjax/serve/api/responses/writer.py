"""Converts the deltas of a chat to the output items of a response, and to its events."""

import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rjax.serve.api.chat_parts import ChatDelta
from rjax.serve.api.responses.events import ResponseEvents
from rjax.serve.http.chunked_json import is_large
from rjax.serve.parsing.tools.parser import CallDelta
from rjax.serve.protocol.errors import ApiError
from rjax.serve.protocol.responses import ChatFinishReason
from rjax.serve.protocol.responses_api_models import (
    IncompleteDetails,
    InputTokensDetails,
    OutputTokensDetails,
    ResponseError,
    ResponseFunctionToolCall,
    ResponseOutputItem,
    ResponseOutputMessage,
    ResponseOutputText,
    ResponseReasoningItem,
    ResponseReasoningText,
    ResponsesResponse,
    ResponseUsage,
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
        events: composes the events of a stream; None for a response that does not stream.
    """

    def __init__(self, response: ResponsesResponse, events: ResponseEvents | None = None) -> None:
        self.response = response
        self.size = 0
        """Number of logprobs, including alternatives; they dominate the size of an event."""
        self._events = events
        self._done: list[ResponseOutputItem] = []
        self._item: ResponseOutputItem | None = None  # the open item, without its content
        self._call_index: int | None = None
        self._pieces: list[str] = []  # of the open item's text or arguments
        self._logprobs: list[dict[str, Any]] = []
        self._held = ""  # leading white space, dropped if no text follows

    def feed(self, delta: ChatDelta) -> None:
        """Add a delta."""
        if delta.reasoning:
            self._reasoning(delta.reasoning)
        logprobs = () if delta.logprobs is None else delta.logprobs["content"]
        if delta.content or logprobs:
            self._text(delta.content, logprobs)
        if delta.call is not None:
            self._call(delta.call)

    def finish(self, reason: ChatFinishReason, usage: Mapping[str, Any]) -> None:
        """Complete the response.

        Args:
            reason: finish reason of the chat.
            usage: the chat's fields of `UsageInfo`.
        """
        response = self.response
        response.usage = _usage(usage)
        if reason in ("abort", "error"):
            self.fail(ApiError(500, "the request took longer than this server allows"))
            return
        if not self._done and self._item is None:
            self._begin_text(self._held)
        cut = reason == "length"
        self._close("incomplete" if cut else "completed")
        response.output = self._done
        response.status = "incomplete" if cut else "completed"
        if cut:
            response.incomplete_details = IncompleteDetails(reason="max_output_tokens")
        response.completed_at = int(time.time())

    def cancel(self) -> None:
        """End the response with the items so far."""
        self._break_off()
        self.response.status = "cancelled"

    def fail(self, error: ApiError) -> None:
        """End the response with an error and the items so far."""
        self._break_off()
        self.response.status = "failed"
        self.response.error = ResponseError.model_validate(
            {"code": _FAILURES.get(error.status, "server_error"), "message": error.message}
        )

    def _break_off(self) -> None:
        if self._item is not None:
            self._done.append(self._whole_item("incomplete"))
            self._item = None
        self.response.output = self._done

    def _reasoning(self, text: str) -> None:
        if not isinstance(self._item, ResponseReasoningItem):
            self._close("completed")
            name = f"rs_{secrets.token_hex(12)}"
            self._open(ResponseReasoningItem(id=name, status="in_progress", content=[]))
        self._add(text)

    def _text(self, text: str, logprobs: Sequence[dict[str, Any]]) -> None:
        if isinstance(self._item, ResponseOutputMessage):
            self._add(text, logprobs)
            return
        self._held += text
        if self._held.strip() or logprobs:
            self._close("completed")
            self._begin_text(self._held, logprobs)

    def _begin_text(self, text: str, logprobs: Sequence[dict[str, Any]] = ()) -> None:
        name = f"msg_{secrets.token_hex(12)}"
        self._open(ResponseOutputMessage(id=name, status="in_progress", content=[]))
        if text or logprobs:
            self._add(text, logprobs)

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
            self._add(piece.arguments)

    def _add(self, text: str, logprobs: Sequence[dict[str, Any]] = ()) -> None:
        """Add to the open item."""
        self._pieces.append(text)
        if logprobs:
            self._logprobs += logprobs
            self.size += sum([1 + len(entry["top_logprobs"]) for entry in logprobs])
        if self._events is not None:
            self._events.delta(text, logprobs)

    def _open(self, item: ResponseOutputItem) -> None:
        self._held = ""
        self._item = item
        if self._events is not None:
            self._events.open(len(self._done), item)

    def _close(self, status: Status) -> None:
        """Complete the open item, if there is one."""
        if self._item is None:
            return
        item = self._whole_item(status)
        if self._events is not None:
            self._events.close(len(self._done), item, large=is_large(self.size))
        self._done.append(item)
        self._item, self._pieces, self._logprobs = None, [], []

    def _whole_item(self, status: Status) -> ResponseOutputItem:
        """The open item with its content so far."""
        whole = "".join(self._pieces)
        if isinstance(self._item, ResponseOutputMessage):
            logprobs = [TextLogprob.model_validate(entry) for entry in self._logprobs]
            part = ResponseOutputText(text=whole, logprobs=logprobs)
            return self._item.model_copy(update={"status": status, "content": [part]})
        if isinstance(self._item, ResponseReasoningItem):
            part = ResponseReasoningText(text=whole)
            return self._item.model_copy(update={"status": status, "content": [part]})
        assert self._item is not None
        return self._item.model_copy(update={"status": status, "arguments": whole})


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
