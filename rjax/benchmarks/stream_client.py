"""A client for many streams at once: raw sockets, in processes of their own.

An HTTP library takes longer for a piece of a stream than the server under test. Here a piece costs
a system call and a time stamp; the pieces are parsed after the stream has ended.
"""

import asyncio
import contextlib
import dataclasses
import json
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import h11

from rjax.child_python import child_command

_CLIENT = "from rjax.benchmarks.stream_client import main; main()"


@dataclasses.dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a load.

    Attributes:
        at: when to send it, in seconds after the start of the load.
        path: path of the route.
        body: JSON body of the request.
    """

    at: float
    path: str
    body: dict[str, Any]


@dataclasses.dataclass(slots=True)
class Streamed:
    """One answer; times in seconds on the clock of `time.perf_counter`, which processes share.

    Attributes:
        due: when the request was to be sent.
        sent: when it was sent.
        status: HTTP status of the answer; 0 if the connection failed.
        times: times at which the last bytes of each event had arrived.
        events: data of each event, ``[DONE]`` left out; the body of an answer that is no stream.
        end: when the last bytes of the answer had arrived.
        ended: whether the answer came to its end.
        error: why the connection failed, or None.
    """

    due: float
    sent: float = 0.0
    status: int = 0
    times: list[float] = dataclasses.field(default_factory=list)
    events: list[str] = dataclasses.field(default_factory=list)
    end: float = 0.0
    ended: bool = False
    error: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Address:
    """Where a server listens, and how to speak to it.

    Attributes:
        host, port: host and port of the server.
        tls: whether it speaks HTTPS.
        key: API key, or None.
    """

    host: str
    port: int
    tls: bool = False
    key: str | None = None

    def request(self, path: str, body: dict[str, Any]) -> bytes:
        """The bytes of a POST."""
        content = json.dumps(body).encode()
        authorization = "" if self.key is None else f"Authorization: Bearer {self.key}\r\n"
        host = f"[{self.host}]" if ":" in self.host else self.host
        head = (
            f"POST {path} HTTP/1.1\r\nHost: {host}:{self.port}\r\n{authorization}"
            f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        )
        return head.encode() + content

    async def connect(self) -> "_Connection":
        """A new connection.

        Raises:
            OSError: there is none.
        """
        loop = asyncio.get_running_loop()
        tls = True if self.tls else None
        _, connection = await loop.create_connection(_Connection, self.host, self.port, ssl=tls)
        return connection


class _Connection(asyncio.Protocol):
    """A kept connection that records one answer at a time."""

    def __init__(self) -> None:
        self.transport: Any = None
        self._pieces: list[tuple[float, bytes]] = []
        self._tail = b""
        self._whole: int | None = None  # bytes of the answer; 0 if it is chunked, -1 if unknown
        self._size = 0
        self._done: asyncio.Future[bool] | None = None

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self._pieces.append((time.perf_counter(), data))
        self._size += len(data)
        if self._whole is None:
            self._read_head()
        else:
            self._tail = (self._tail + data)[-7:]
        ended = self._tail == b"\r\n0\r\n\r\n" if self._whole == 0 else self._size == self._whole
        if ended and self._done is not None and not self._done.done():
            self._done.set_result(True)

    def _read_head(self) -> None:
        data = b"".join(piece for _, piece in self._pieces)
        head, found, rest = data.partition(b"\r\n\r\n")
        if not found:
            return
        lower = head.lower()
        self._whole = 0 if b"transfer-encoding: chunked" in lower else -1
        if b"content-length:" in lower:
            length = int(lower.split(b"content-length:")[1].split(b"\r\n")[0])
            self._whole = len(head) + 4 + length
        self._tail = rest[-7:]

    def connection_lost(self, exc: Exception | None) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_result(self._whole == -1)

    async def ask(self, request: bytes, due: float) -> Streamed:
        """Send a request and record its answer."""
        self._pieces, self._tail, self._whole, self._size = [], b"", None, 0
        self._done = asyncio.get_running_loop().create_future()
        found = Streamed(due, time.perf_counter())
        self.transport.write(request)
        found.ended = await self._done
        found.end = self._pieces[-1][0] if self._pieces else time.perf_counter()
        try:
            _read(found, self._pieces)
        except h11.ProtocolError as error:
            found.error = f"the answer is not HTTP: {error}"
        return found


def _read(found: Streamed, pieces: Sequence[tuple[float, bytes]]) -> None:
    """Take the events and their times out of what arrived."""
    http = h11.Connection(h11.CLIENT)
    http.send(h11.Request(method="POST", target="/", headers=[("Host", "a")]))
    http.send(h11.EndOfMessage())
    streams = False
    body = b""
    for at, piece in pieces:
        http.receive_data(piece)
        while True:
            part = http.next_event()
            if isinstance(part, h11.Response):
                found.status = part.status_code
                kind = dict(part.headers).get(b"content-type", b"")
                streams = kind.startswith(b"text/event-stream")
            elif isinstance(part, h11.Data):
                body += part.data
            else:  # more is needed, or it is the end
                break
        if streams:
            *whole, body = body.replace(b"\r\n", b"\n").split(b"\n\n")
            for event in whole:
                lines = [line[5:].strip() for line in event.split(b"\n") if line[:5] == b"data:"]
                if lines and lines != [b"[DONE]"]:
                    found.events.append(b"\n".join(lines).decode("utf-8", "replace"))
                    found.times.append(at)
    if not streams and pieces:
        found.events.append(body.decode("utf-8", "replace"))
        found.times.append(pieces[-1][0])


async def stream_load(
    address: Address, arrivals: Sequence[Arrival], start: float, most: int | None = None
) -> list[Streamed]:
    """Send each request at its time and read all answers.

    Args:
        address: the server's address.
        arrivals: the requests.
        start: start of the load on the clock of `time.perf_counter`; the connections of requests
            without delay are opened before.
        most: most requests under way at once; None for no limit.
    """
    most = len(arrivals) if most is None else most
    free: list[_Connection] = []
    with contextlib.suppress(OSError):  # each request says so
        for _ in [arrival for arrival in arrivals if arrival.at == 0][:most]:
            free.append(await address.connect())
    turn = asyncio.Semaphore(most)

    async def one(arrival: Arrival) -> Streamed:
        due = start + arrival.at
        request = address.request(arrival.path, arrival.body)
        await asyncio.sleep(due - time.perf_counter())
        async with turn:
            while free and free[-1].transport.is_closing():
                free.pop()
            try:
                connection = free.pop() if free else await address.connect()
            except OSError as error:
                return Streamed(due, due, end=time.perf_counter(), error=f"no connection: {error}")
            found = await connection.ask(request, due)
            if found.ended:
                free.append(connection)
        return found

    try:
        return await asyncio.gather(*map(one, arrivals))
    finally:
        for connection in free:
            connection.transport.close()


def stream_load_in_processes(
    address: Address,
    arrivals: Sequence[Arrival],
    processes: int,
    *,
    most: int | None = None,
    lead_seconds: float = 2.0,
) -> list[Streamed]:
    """`stream_load` divided among processes, so that no client holds another one up.

    Args:
        address, arrivals: see `stream_load`.
        processes: number of client processes; fewer for fewer requests.
        most: most requests under way at once, in all processes; None for no limit.
        lead_seconds: seconds for opening connections, before the first request.

    Raises:
        RuntimeError: a client failed.
    """
    processes = max(1, min(processes, len(arrivals), most or len(arrivals)))
    with contextlib.ExitStack() as stack:
        clients = [
            stack.enter_context(
                subprocess.Popen(
                    child_command(_CLIENT),
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
            part = [(arrival.at, arrival.path, arrival.body) for arrival in arrivals[i::processes]]
            share = None if most is None else most // processes + (i < most % processes)
            given.write(json.dumps([dataclasses.astuple(address), part, start, share]))
            given.close()
        texts = [output.read() for _, output in pipes]
    if any(client.returncode for client in clients):
        raise RuntimeError("a client process failed; what it printed says why")
    return [Streamed(*found) for text in texts for found in json.loads(text)]


def main() -> None:
    """Run a client process: read a load from the standard input and write its answers to the
    standard output."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C reaches all processes; one reports it
    print(flush=True)
    address, part, start, most = json.load(sys.stdin)
    arrivals = [Arrival(*fields) for fields in part]
    answers = asyncio.run(stream_load(Address(*address), arrivals, start, most))
    json.dump([dataclasses.astuple(answer) for answer in answers], sys.stdout)
