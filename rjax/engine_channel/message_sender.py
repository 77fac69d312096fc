"""MessageSender: sends messages of an engine process without ever blocking its engine."""

import socket
import threading
import time
from collections.abc import Iterable

from rjax.engine_channel.messages import Beat, Event, Step, frame
from rjax.engine_channel.output_codec import SentRequest
from rjax.engine_channel.output_queue import join_output
from rjax.outputs import RequestOutput
from rjax.sampling import RequestOutputKind

_CHUNK = 64 * 2**10  # bytes that the thread sends at once


class MessageSender:
    """Sends to a front end. Any thread may call the methods; none of them blocks on the socket.

    Requests send new tokens, or one output at the end. While the socket is full, outputs of one
    request are merged, so that the memory is bounded by what the engine holds of its requests. A
    thread sends the rest.

    Args:
        sock: blocking socket to the front end.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._changed = threading.Condition()
        self._unsent = bytearray()
        self._held: dict[str, RequestOutput] = {}
        self._requests: dict[str, SentRequest] = {}
        self._broken = False
        threading.Thread(target=self._send_rest, name="rjax-send", daemon=True).start()

    def open_request(self, request_id: str, num_tokens: int) -> None:
        """Expect outputs of a request.

        Args:
            request_id: unique among unfinished requests.
            num_tokens: number of tokens of the prompt.
        """
        with self._changed:
            self._requests[request_id] = SentRequest(num_tokens)

    def close_request(self, request_id: str) -> None:
        """Forget a request that the engine refused."""
        with self._changed:
            self._requests.pop(request_id, None)

    def send(self, message: Event) -> None:
        """Send a message. A `Beat` is dropped while the socket is full."""
        data = frame(message)
        with self._changed:
            if not (self._unsent and isinstance(message, Beat)):
                self._push(data)

    def send_outputs(self, outputs: list[RequestOutput]) -> None:
        """Send the outputs of a step, or hold them while the socket is full."""
        with self._changed:
            if self._unsent:
                for output in outputs:
                    self._hold(output)
            else:
                self._push(self._step(outputs))

    def flush(self, seconds: float) -> None:
        """Wait until everything is sent, or the time is over."""
        end = time.monotonic() + seconds
        with self._changed:
            while self._unsent and not self._broken and (left := end - time.monotonic()) > 0:
                self._changed.wait(left)

    def _step(self, outputs: Iterable[RequestOutput]) -> bytes:
        packed = []
        for output in outputs:
            request = self._requests.get(output.request_id)
            if request is None:
                continue
            packed.append(request.pack(output))
            if output.finished:
                del self._requests[output.request_id]
        return frame(Step(packed)) if packed else b""

    def _hold(self, output: RequestOutput) -> None:
        if output.request_id in self._requests:
            join_output(self._held, output, RequestOutputKind.DELTA)

    def _push(self, data: bytes) -> None:
        """Send as much as fits, and leave the rest to the thread."""
        if self._broken:
            return
        sent = 0
        if not self._unsent:
            try:
                sent = self._sock.send(data, socket.MSG_DONTWAIT) if data else 0
            except BlockingIOError:
                pass
            except OSError:  # the front end is gone
                self._broken = True
                return
        if sent < len(data):
            self._unsent += memoryview(data)[sent:]
            self._changed.notify_all()

    def _send_rest(self) -> None:
        """Send the bytes that are left; the target of the thread."""
        while True:
            with self._changed:
                while not self._unsent:
                    self._changed.wait()
                chunk = bytes(memoryview(self._unsent)[:_CHUNK])
            try:
                sent = self._sock.send(chunk)
            except OSError:
                with self._changed:
                    self._broken = True
                    self._unsent.clear()
                    self._held.clear()
                    self._changed.notify_all()
                return
            with self._changed:
                del self._unsent[:sent]
                if not self._unsent:
                    outputs, self._held = self._held, {}
                    self._push(self._step(outputs.values()))
                self._changed.notify_all()
