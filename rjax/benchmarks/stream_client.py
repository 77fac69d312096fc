"""A client for many streams at once: raw sockets, in processes of their own.

An HTTP library takes longer for a piece of a stream than the server under test. Here a piece costs
a system call and a time stamp; the pieces are parsed after the stream has ended.
"""

import asyncio
import contextlib
import dataclasses
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a load.

    Attributes:
        at: when to send it, in seconds after the start of the load.
        path: of the route.
        body: of the request.
    """

    at: float
    path: str
    body: dict[str, Any]


@dataclasses.dataclass(slots=True)
class Streamed:
    """One answer; times in seconds on the clock of `time.perf_counter`, which processes share.

    Attributes:
        sent: when the request was sent.
        status: of the answer; 0 if the connection failed.
        times: of each event, when the HTTP chunk that ends it had arrived.
        events: data of each event, ``[DONE]`` left out; of an answer that is no stream, its body.
        ended: whether the answer came to its end.
    """

    sent: float
    status: int = 0
    times: list[float] = dataclasses.field(default_factory=list)
    events: list[str] = dataclasses.field(default_factory=list)
    ended: bool = False


class _Connection(asyncio.Protocol):
    """A kept connection that records one answer at a time."""

    def __init__(self) -> None:
        self.transport: Any = None
        self._pieces: list[tuple[float, bytes]] = []
        self._tail = b""
        self._wanted: int | None = None
        self._size = 0
        self._done: asyncio.Future[bool] | None = None

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self._pieces.append((time.perf_counter(), data))
        self._size += len(data)
        if self._wanted is None:
            self._read_head()
        else:
            self._tail = (self._tail + data)[-7:]
        ended = self._tail == b"\r\n0\r\n\r\n" if self._wanted == 0 else self._size == self._wanted
        if ended and self._done is not None and not self._done.done():
            self._done.set_result(True)

    def _read_head(self) -> None:
        data = b"".join(piece for _, piece in self._pieces)
        head, found, rest = data.partition(b"\r\n\r\n")
        if not found:
            return
        lower = head.lower()
        self._wanted = 0
        if b"content-length:" in lower:
            length = int(lower.split(b"content-length:")[1].split(b"\r\n")[0])
            self._wanted = len(head) + 4 + length
        self._tail = rest[-7:]

    def connection_lost(self, exc: Exception | None) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_result(False)

    async def ask(self, request: bytes) -> Streamed:
        """Send a request and record its answer."""
        self._pieces, self._tail, self._wanted, self._size = [], b"", None, 0
        self._done = asyncio.get_running_loop().create_future()
        found = Streamed(time.perf_counter())
        self.transport.write(request)
        found.ended = await self._done
        _read(found, self._pieces)
        return found


def _read(found: Streamed, pieces: Sequence[tuple[float, bytes]]) -> None:
    """Take the events and their times out of what arrived."""
    data = b"".join(piece for _, piece in pieces)
    head, _, body = data.partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 "):
        return
    found.status = int(head[9:12])
    offset = len(head) + 4
    if b"transfer-encoding: chunked" not in head.lower():
        found.events.append(body.decode("utf-8", "replace"))
        found.times += [at for at, _ in pieces[-1:]]
        return
    ends, size = [], 0
    for at, piece in pieces:
        size += len(piece)
        ends.append((size, at))
    place, event, part = 0, b"", 0
    while True:
        line = body.find(b"\r\n", place)
        length = int(body[place:line], 16) if line >= 0 else 0
        if not length or line + 2 + length > len(body):
            return
        event += body[line + 2 : line + 2 + length]
        place = line + length + 4
        while ends[part][0] < offset + place - 2:
            part += 1
        *whole, event = event.split(b"\n\n")
        for one in whole:
            text = next(x[6:] for x in one.split(b"\n") if x.startswith(b"data: "))
            if text != b"[DONE]":
                found.events.append(text.decode())
                found.times.append(ends[part][1])


async def stream_load(
    host: str, port: int, arrivals: Sequence[Arrival], start: float, key: str | None = None
) -> list[Streamed]:
    """Send each request at its time and read all answers.

    Args:
        host, port: of the server.
        arrivals: the requests.
        start: of the load on the clock of `time.perf_counter`; connections are opened before.
        key: API key, or None.
    """
    loop = asyncio.get_running_loop()
    free: list[_Connection] = []
    for _ in arrivals:
        _, connection = await loop.create_connection(_Connection, host, port)
        free.append(connection)

    async def one(arrival: Arrival) -> Streamed:
        body = json.dumps(arrival.body).encode()
        authorization = "" if key is None else f"Authorization: Bearer {key}\r\n"
        head = (
            f"POST {arrival.path} HTTP/1.1\r\nHost: {host}:{port}\r\n{authorization}"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        await asyncio.sleep(start + arrival.at - time.perf_counter())
        connection = free.pop()
        found = await connection.ask(head.encode() + body)
        if found.ended:
            free.append(connection)
        return found

    try:
        return await asyncio.gather(*map(one, arrivals))
    finally:
        for connection in free:
            connection.transport.close()


def stream_load_in_processes(
    host: str,
    port: int,
    arrivals: Sequence[Arrival],
    processes: int,
    key: str | None = None,
    lead_seconds: float = 2.0,
) -> list[Streamed]:
    """`stream_load` divided among processes, so that no client holds another one up.

    Args:
        host, port, arrivals, key: as in `stream_load`.
        processes: clients.
        lead_seconds: for opening connections, before the first request.

    Raises:
        RuntimeError: a client failed.
    """
    with contextlib.ExitStack() as stack:
        clients = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-m", __name__],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            for _ in range(processes)
        ]
        pipes: list[Any] = [(client.stdin, client.stdout) for client in clients]
        for _, output in pipes:
            output.readline()  # it has started
        start = time.perf_counter() + lead_seconds
        for i, (given, _) in enumerate(pipes):
            part = [dataclasses.astuple(arrival) for arrival in arrivals[i::processes]]
            given.write(json.dumps([host, port, part, start, key]))
            given.close()
        texts = [output.read() for _, output in pipes]
    if any(client.returncode for client in clients):
        raise RuntimeError("a client process failed; what it printed says why")
    return [Streamed(*found) for text in texts for found in json.loads(text)]


def _main() -> None:
    """A client process: a load on the standard input, its answers on the standard output."""
    print(flush=True)
    host, port, part, start, key = json.load(sys.stdin)
    arrivals = [Arrival(*fields) for fields in part]
    answers = asyncio.run(stream_load(host, port, arrivals, start, key))
    json.dump([dataclasses.astuple(answer) for answer in answers], sys.stdout)


if __name__ == "__main__":
    _main()
