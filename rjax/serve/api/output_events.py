"""A response of server-sent events that are written as the engine makes their outputs."""

import asyncio
import time
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
    """Converts the outputs of a request to the events of its stream."""

    def is_large(self, prompt: int, output: RequestOutput) -> bool:
        """Whether to encode this output on a thread."""
        ...

    def encode(self, prompt: int, output: RequestOutput) -> list[str]:
        """The events of an output.

        Args:
            prompt: its index in the request.
            output: with what is new.
        """
        ...

    def end(self) -> str:
        """The events after the last output."""
        ...


class OutputEvents(EventStream):
    """The outputs of a request, each encoded and written in the callback that brings it.

    While the client reads too slowly, or an output is encoded on a thread, the outputs are kept in
    an `OutputQueue`, which joins and bounds them. It is the sink of its group.

    Args:
        group: of the request.
        encoder: of its outputs.
        threads: for large outputs.
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

    def put(self, output: RequestOutput) -> None:
        """See `rjax.output_queue.OutputSink`."""
        if self._is_ready and not self.wire.is_paused:
            self._write(output)
        else:
            self._is_ready = False
            self._unread.put(output)

    def fail(self, error: Exception) -> None:
        """See `rjax.output_queue.OutputSink`."""
        self._unread.fail(error)
        if self._is_ready:
            self._write_unread()

    def begin(self) -> None:
        """See `EventStream`."""
        self.wire.on_resume(self._resume)
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
        try:
            prompt = self._group.accept(output)
            if prompt is None:
                return
            if self._encoder.is_large(prompt, output):
                self._is_ready = False
                self._on_thread = asyncio.ensure_future(self._encode_on_thread(prompt, output))
                return
            text = "".join(self._encoder.encode(prompt, output))
            if self._group.done:
                text += self._encoder.end()
                self._is_ready = False
                self.end()
            if text:
                self.wire.write(event_bytes(text))
        except Exception as error:
            self._write_error(error)

    async def _encode_on_thread(self, prompt: int, output: RequestOutput) -> None:
        """Encode a large output, and write its events no faster than the client reads."""
        try:
            for event in await self._threads.run(self._encoder.encode, prompt, output):
                while self.wire.is_paused:
                    self._not_paused.clear()
                    await self._not_paused.wait()
                self.wire.write(event_bytes(event))
            if self._group.done:
                self.wire.write(event_bytes(self._encoder.end()))
                self.end()
        except Exception as error:
            self._write_error(error)
        self._on_thread = None
        self._write_unread()

    def _write_error(self, error: Exception) -> None:
        self.wire.write(event_bytes(f"data: {stream_error(error)}\n\n"))
        self._is_ready = False
        self.end()
        self._group.close()
