"""The outputs of a chat run as a response: its JSON, or the events of its stream."""

import threading

from rjax.outputs import RequestOutput, num_entries
from rjax.serve.api.chat_parts import ChatParts
from rjax.serve.api.output_events import OutputEncoder
from rjax.serve.api.responses.events import ResponseEvents
from rjax.serve.api.responses.record import ResponseRecord
from rjax.serve.api.responses.writer import ResponseWriter
from rjax.serve.http.chunked_json import is_large
from rjax.serve.protocol.errors import as_api_error
from rjax.serve.protocol.responses import ChatFinishReason
from rjax.serve.protocol.responses_api_models import ResponsesResponse


class ResponseBuilder:
    """Builds a response from the outputs of its chat run. All methods may be called from any
    thread: a response may be cancelled while a thread works on its last output.

    Args:
        writer: the response's writer.
        parts: converts the chat's outputs to deltas.
        record: the response's record.
    """

    def __init__(self, writer: ResponseWriter, parts: ChatParts, record: ResponseRecord) -> None:
        self._writer = writer
        self._parts = parts
        self._record = record
        self._reason: ChatFinishReason | None = None
        self._lock = threading.Lock()

    def add(self, output: RequestOutput, *, last: bool) -> str | None:
        """Add an output; returns the JSON of the response if it was the last one."""
        with self._lock:
            for delta in self._parts.deltas(output):
                self._writer.feed(delta)
                self._reason = delta.finish_reason or self._reason
            if not last:
                return None
            assert self._reason is not None
            self._writer.finish(self._reason, self._parts.usage())
            return self._end()

    def fail(self, error: Exception) -> str:
        """End the response with an error; returns its JSON."""
        with self._lock:
            self._writer.fail(as_api_error(error))
            return self._end()

    def cancel(self) -> None:
        """End the response as it is, unless it has just ended."""
        with self._lock:
            if self._writer.response.status == "in_progress":
                self._writer.cancel()
            self._end()

    def is_large(self, size: int = 0) -> bool:
        """Whether to end the response on a thread.

        Args:
            size: number of logprobs, including alternatives, to be added before that.
        """
        return self._record.is_large or is_large(self._writer.size + size)

    def _end(self) -> str:
        return self._record.end(large=self.is_large())


class ResponseEncoder(OutputEncoder):
    """The events of a response's stream.

    Args:
        response: the response, without output.
        started: JSON of the response without output.
        parts: converts the chat's outputs to deltas.
        record: the response's record.
    """

    def __init__(
        self, response: ResponsesResponse, started: str, parts: ChatParts, record: ResponseRecord
    ) -> None:
        self._response = response
        self._started = started
        self._events = ResponseEvents()
        self._record = record
        self.builder = ResponseBuilder(ResponseWriter(response, self._events), parts, record)

    def begin(self) -> str:
        """See `OutputEncoder`."""
        for status in ("created", "in_progress"):
            self._events.response(status, self._started)
        self._started = ""
        return "".join(self._events.take())

    def is_large(self, prompt: int, output: RequestOutput, *, last: bool) -> bool:
        """See `OutputEncoder`."""
        logprobs = output.outputs[0].logprobs
        size = 0 if logprobs is None else num_entries(logprobs)
        return self.builder.is_large(size) if last else is_large(size)

    def encode(self, prompt: int, output: RequestOutput, *, last: bool) -> list[str]:
        """See `OutputEncoder`."""
        whole = self.builder.add(output, last=last)
        if whole is not None:
            self._events.response(self._response.status, whole)
        return self._events.take()

    @property
    def is_large_failure(self) -> bool:
        """See `OutputEncoder`."""
        return self.builder.is_large()

    def fail(self, error: Exception) -> list[str]:
        """See `OutputEncoder`."""
        self._events.response("failed", self.builder.fail(error))
        return self._events.take()

    def store(self) -> None:
        """See `OutputEncoder`."""
        self._record.store()
