"""Publishes batches of KV events over ZeroMQ, on a thread of its own."""

import contextlib
import itertools
import logging
import queue
import re
import threading
import time
from collections import deque
from collections.abc import Set
from typing import Any

from rjax.config.kv_events import KvEventsConfig
from rjax.engine.kv_events.event_log import CacheEvent
from rjax.engine.kv_events.wire_format import batch
from rjax.errors import InvalidConfigError
from rjax.extras import install_command

_DEFAULT_ENDPOINT = "tcp://127.0.0.1:5557"
_END = (-1).to_bytes(8, "big", signed=True)  # of a replay
_POLL_SECONDS = 0.1
_CLOSE_SECONDS = 1.0
_REQUEST_BYTES = 256  # of a frame from a subscriber; a replay request has 8
_REQUESTS_A_TURN = 64  # then batches are sent again
_PORT = re.compile(r":(\d+)$")
_log = logging.getLogger(__name__)


class KvEventPublisher:
    """Sends each batch as three frames: topic, sequence number (8 bytes, big-endian), msgpack.

    `publish` never waits: while the queue is full, batches are dropped and counted, and the gap in
    the sequence numbers shows it to subscribers. The replay socket answers a request of a sequence
    number with all later batches that are kept, and an end marker (sequence number -1).

    Args:
        config: the engine's options of KV events.
        page_size: tokens of a page.
        roots: root keys of unsalted chains; may grow.
        has_states: whether events name their group.

    Attributes:
        published: batches handed to the socket.
        dropped: batches that found the queue full.

    Raises:
        InvalidConfigError: pyzmq or msgpack is not installed, or an address cannot be used.
    """

    def __init__(
        self, config: KvEventsConfig, page_size: int, roots: Set[bytes], *, has_states: bool = False
    ) -> None:
        try:
            import msgpack
            import zmq
        except ModuleNotFoundError as error:
            raise InvalidConfigError(
                f"KV events need {error.name}, which is not installed; run: "
                + install_command("kv-events")
            ) from error
        self.published = 0
        self.dropped = 0
        self._malformed = 0
        self._config = config
        self._page_size = page_size
        self._roots = roots
        self._has_states = has_states
        self._pack = msgpack.Packer().pack
        self._sequence = itertools.count()
        self._queue: queue.Queue[tuple[int, float, list[CacheEvent]] | None] = queue.Queue(
            config.max_queue_size
        )
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps)
        self._context = zmq.Context()
        try:
            self._socket, self._replay = self._open(zmq)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise InvalidConfigError(
                f"an address of kv_events_config cannot be used ({error}): "
                f"{config.endpoint or _DEFAULT_ENDPOINT}, {config.replay_endpoint}"
            ) from error
        self._thread = threading.Thread(target=self._run, name="rjax-kv-events", daemon=True)
        self._thread.start()

    def publish(self, events: list[CacheEvent]) -> None:
        """Queue the events of a step; for the engine's thread."""
        number = next(self._sequence)
        try:
            self._queue.put_nowait((number, time.time(), events))
        except queue.Full:
            if not self.dropped:
                _log.warning("KV events are dropped: the publisher's queue is full")
            self.dropped += 1

    def close(self) -> None:
        """Send what is queued, for at most a second, and close the sockets."""
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=_CLOSE_SECONDS)
        self._thread.join(_CLOSE_SECONDS)
        self._context.destroy(linger=0)

    def _open(self, zmq: Any) -> tuple[Any, Any]:
        rank = self._config.data_parallel_rank
        endpoint = self._config.endpoint or _DEFAULT_ENDPOINT
        bound = self._config.endpoint is None or (
            "*" in endpoint or "::" in endpoint or not endpoint.startswith("tcp://")
        )
        publishing = self._context.socket(zmq.PUB)
        publishing.setsockopt(zmq.MAXMSGSIZE, max(_REQUEST_BYTES, 2 * len(self._config.topic)))
        publishing.set_hwm(self._config.hwm)
        (publishing.bind if bound else publishing.connect)(endpoint_of_rank(endpoint, rank))
        if self._config.replay_endpoint is None:
            return publishing, None
        replay = self._context.socket(zmq.ROUTER)
        replay.setsockopt(zmq.MAXMSGSIZE, _REQUEST_BYTES)  # who sends more is disconnected
        replay.set_hwm(2 * (self._config.buffer_steps + 1))
        replay.bind(endpoint_of_rank(self._config.replay_endpoint, rank))
        return publishing, replay

    def _run(self) -> None:
        topic = self._config.topic.encode()
        while True:
            self._answer_requests()
            try:
                item = self._queue.get(timeout=_POLL_SECONDS)
            except queue.Empty:
                continue
            if item is None:
                return
            number, seconds, events = item
            payload = self._pack(
                batch(
                    events,
                    seconds=seconds,
                    rank=self._config.data_parallel_rank,
                    page_size=self._page_size,
                    roots=self._roots,
                    has_states=self._has_states,
                    event_format=self._config.event_format,
                )
            )
            self._kept.append((number, payload))
            self.published += 1  # before anyone can have received it
            self._socket.send_multipart((topic, number.to_bytes(8, "big"), payload))

    def _answer_requests(self) -> None:
        for _ in range(_REQUESTS_A_TURN):
            if self._replay is None or not self._replay.poll(0):
                return
            self._answer()

    def _answer(self) -> None:
        """Answer one replay request; others are ignored, and the first of them is logged."""
        frames = self._replay.recv_multipart()
        if len(frames) != 3 or len(frames[2]) != 8:
            if not self._malformed:
                _log.warning("a replay request of KV events is not a sequence number of 8 bytes")
            self._malformed += 1
            return
        client, _, start = frames
        for number, payload in self._kept:
            if number >= int.from_bytes(start, "big"):
                self._replay.send_multipart((client, b"", number.to_bytes(8, "big"), payload))
        self._replay.send_multipart((client, b"", _END, b""))


def endpoint_of_rank(endpoint: str, rank: int) -> str:
    """The address of one of several replicas: its port, or its name, moves with the rank."""
    if rank == 0:
        return endpoint
    if endpoint.startswith("tcp://"):
        return _PORT.sub(lambda port: f":{int(port[1]) + rank}", endpoint)
    return f"{endpoint}_dp{rank}"
