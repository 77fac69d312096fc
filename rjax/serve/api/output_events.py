"""A response of server-sent events that are written as the engine makes their outputs."""

import asyncio
import functools
import time
from collections.abc import Callable
from typing import Protocol, runtime_checkable

from rjax.outputs import RequestOutput
from rjax.serve.api.request_group import RequestGroup
from rjax.serve.http.event_stream import EventStream
from rjax.serve.http.threads import WorkThreads
from rjax.serve.http.wire import event_bytes
from rjax.serve.protocol.errors import stream_error

_TIME_SLICE = 0.002  # seconds that the unread outputs of one request may take at once
DONE = "data: [DONE]\n\n"
"""The last event of OpenAI's streams."""


@runtime_checkable
class OutputEncoder(Protocol):
    """Converts the outputs of a request to the events of its stream; a base class of encoders."""

    def begin(self) -> str:
        """The events before the first output."""
        return ""

    def is_large(self, prompt: int, output: RequestOutput, *, last: bool) -> bool:
        """Whether to `encode` this output on a thread."""
        return False

    def encode(self, prompt: int, output: RequestOutput, *, last: bool) -> list[str]:
        """The events of an output.

        Args:
            prompt: index of the output's prompt in the request.
            output: the prompt's next output, with its new tokens.
            last: the output ends the request; the stream's last events follow its own.
        """
        ...

    @property
    def is_large_failure(self) -> bool:
        """Whether to call `fail` on a thread."""
        return False

    def fail(self, error: Exception) -> list[str]:
        """The last events of a request that ends on an error."""
        return [f"data: {stream_error(error)}\n\n"]

    def store(self) -> None:
        """Store the result. Called on the event loop between making and writing the last events."""
        return


class OutputEvents(EventStream):
    """The outputs of a request, each encoded and written in the callback that brings it.

    While the client reads too slowly, or an output is encoded on a thread, the outputs are kept in
    an `OutputQueue`, which joins and bounds them. It is the sink of its group.

    Args:
        group: the request's engine requests.
        encoder: converts their outputs to events.
        threads: threads that encode large outputs.
    """

    def __init__(self, group: RequestGroup, encoder: OutputEncoder, threads: WorkThreads) -> None:
        super().__init__()
        self._group = group
        self._encoder = encoder
        self._threads = threads
        self._unread = group.new_queue()
        self._is_ready = False  # whether an output may be written now
        self._on_thread: asyncio.Task[None] | None = None
        self._not_paused = asyncio.Event()
        self._has_failed = False

    def put(self, output: RequestOutput) -> None:
        """See `rjax.engine_channel.output_queue.OutputSink`."""
        if self._is_ready and not self.wire.is_paused:
            self._write(output)
        else:
            self._is_ready = False
            self._unread.put(output)

    def fail(self, error: Exception) -> None:
        """See `rjax.engine_channel.output_queue.OutputSink`."""
        self._unread.fail(error)
        if self._is_ready:
            self._write_unread()

    def begin(self) -> None:
        """See `EventStream`."""
        self.wire.on_resume(self._resume)
        if text := self._encoder.begin():
            self.wire.write(event_bytes(text))
        self._write_unread()

    def close(self) -> None:
        """See `EventStream`."""
        self._is_ready = False
        if self._on_thread is not None:
            self._on_thread.cancel()
        self._group.close()

    def _resume(self) -> None:
        self._not_paused.set()
        self._write_unread()

    def _write_unread(self) -> None:
        start = time.monotonic()
        while self._on_thread is None and not self.wire.is_paused and not self._ended.is_set():
            if time.monotonic() - start > _TIME_SLICE:
                asyncio.get_running_loop().call_soon(self._write_unread)
                return
            try:
                output = self._unread.take()
            except Exception as error:
                self._write_error(error)
                return
            if output is None:
                self._is_ready = True
                return
            self._write(output)

    def _write(self, output: RequestOutput) -> None:
        """Write the events of an output, and the last ones if it ends the request."""
        encoder = self._encoder
        try:
            prompt = self._group.accept(output)
            if prompt is None:
                return
            last = self._group.done
            if encoder.is_large(prompt, output, last=last):
                encode = functools.partial(encoder.encode, prompt, output, last=last)
                self._start_thread(encode, last=last)
                return
            self._write_events(encoder.encode(prompt, output, last=last), last=last)
        except Exception as error:
            self._write_error(error)

    def _write_events(self, events: list[str], *, last: bool) -> None:
        data = event_bytes("".join(events))
        if last:
            self._encoder.store()
        if data:
            self.wire.write(data)
        if last:
            self.end()

    def end(self) -> None:
        """See `EventStream`."""
        self._is_ready = False
        super().end()

    def _start_thread(self, encode: Callable[[], list[str]], *, last: bool) -> None:
        self._is_ready = False
        self._on_thread = asyncio.ensure_future(self._encode_on_thread(encode, last=last))

    async def _encode_on_thread(self, encode: Callable[[], list[str]], *, last: bool) -> None:
        """Encode events on a thread, and write them no faster than the client reads."""
        try:
            events = await self._threads.run(lambda: [event_bytes(event) for event in encode()])
            if last:
                self._encoder.store()
        except Exception as error:
            self._on_thread = None
            self._write_error(error)
            return
        for event in events:
            while self.wire.is_paused:
                self._not_paused.clear()
                await self._not_paused.wait()
            self.wire.write(event)
        self._on_thread = None
        if last:
            self.end()
        else:
            self._write_unread()

    def _write_error(self, error: Exception) -> None:
        """End the stream with the events of an error, or break it off if they fail too."""
        self._is_ready = False
        self._group.close()
        if self._has_failed:
            self._failure = error
            self.end()
            return
        self._has_failed = True
        encode = functools.partial(self._encoder.fail, error)
        if self._encoder.is_large_failure:
            self._start_thread(encode, last=True)
            return
        try:
            self._write_events(encode(), last=True)
        except Exception as second:
            self._write_error(second)
