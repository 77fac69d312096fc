"""Clients that mean harm, and what a server must keep to beside them."""

import asyncio
import contextlib
import dataclasses
import gc
import http.client
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2

from .live_server import LiveServer
from .watch import Stopwatch

HONEST_SECONDS = 3.0  # for an answer to an honest client beside an attack
LOOP_SECONDS = 0.2  # that the event loop may work without a pause, for any request within limits
REFUSED_SECONDS = 1.0  # the same for a request that is refused
KEPT_BYTES = 200 * 10**6  # memory that an attack may leave behind
ELSEWHERE = "127.0.0.2"  # an address for attackers, where honest clients have 127.0.0.1

SHORT = {"prompt": "Who lives in Peru?", "max_tokens": 4, "temperature": 0}


def memory() -> int:
    """Resident bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def open_files() -> int:
    """File descriptors of this process."""
    return len(list(Path("/proc/self/fd").iterdir()))


class LoopWatch:
    """The longest time that the event loop's thread worked between two turns, in CPU seconds.

    CPU time of that thread alone: other work of a busy machine is not the loop's.
    """

    def __init__(self) -> None:
        self.longest = 0.0
        self.done = False

    async def run(self) -> None:
        """Watch until ``done``."""
        while not self.done:
            start = time.thread_time()
            await asyncio.sleep(0.002)
            self.longest = max(self.longest, time.thread_time() - start)


@contextlib.contextmanager
def watched(
    server: LiveServer, most: float = LOOP_SECONDS, *, kept: float = KEPT_BYTES
) -> Iterator[LoopWatch]:
    """A block in which the server's event loop may not work for longer than ``most`` seconds, and
    which leaves less than ``kept`` bytes of memory behind.

    What other tests have made is no garbage, as the command has it: looking through it would be
    the loop's work.
    """
    gc.freeze()
    watch, before = LoopWatch(), memory()
    live_server = asyncio.run_coroutine_threadsafe(watch.run(), server.loop)
    try:
        yield watch
    finally:
        watch.done = True
        live_server.result(30)
        gc.unfreeze()
    assert watch.longest < most, f"the event loop worked {watch.longest:.3f} s without a pause"
    assert memory() - before < kept


def connect(server: LiveServer, source: str = "127.0.0.1", **options: int) -> socket.socket:
    """A connection from an address of this machine; ``receive_buffer`` in bytes."""
    host, port = server.url.removeprefix("http://").split(":")
    link = socket.socket()
    if "receive_buffer" in options:
        link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, options["receive_buffer"])
    link.settimeout(60)
    link.bind((source, 0))
    link.connect((host, int(port)))
    return link


def raw_post(path: str, body: Any, key: str | None = None) -> bytes:
    """The bytes of a POST with a JSON body."""
    content = json.dumps(body).encode()
    authorization = "" if key is None else f"Authorization: Bearer {key}\r\n"
    head = (
        f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n{authorization}"
        f"Content-Length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


def ended(link: socket.socket, seconds: float) -> bytes | None:
    """What the server sent before it closed the connection; None if it did not in that time."""
    link.settimeout(0.1)
    end, found = time.monotonic() + seconds, b""
    while time.monotonic() < end:
        try:
            part = link.recv(65536)
        except TimeoutError:
            continue
        except ConnectionError:
            return found
        if not part:
            return found
        found += part
    return None


@dataclasses.dataclass(frozen=True)
class Answer:
    """A response, read in full."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """The body."""
        return json.loads(self.body)


def ask(
    server: LiveServer,
    method: str,
    path: str,
    body: Any = None,
    *,
    source: str = "127.0.0.1",
    key: str | None = None,
    seconds: float = 60,
) -> Answer:
    """One request on a connection of its own, with little work: many clients share a process."""
    host, port = server.url.removeprefix("http://").split(":")
    link = http.client.HTTPConnection(host, int(port), timeout=seconds, source_address=(source, 0))
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    content = None
    if body is not None:
        content, headers["Content-Type"] = json.dumps(body), "application/json"
    try:
        link.request(method, path, content, headers)
        found = link.getresponse()
        names = {name.lower(): value for name, value in found.getheaders()}
        return Answer(found.status, names, found.read())
    finally:
        link.close()


def get(server: LiveServer, path: str, **more: Any) -> Answer:
    """The request of an honest client; it is answered in time."""
    watch = Stopwatch()
    found = ask(server, "GET", path, **more)
    assert watch.lap() < HONEST_SECONDS, path
    return found


def post(server: LiveServer, body: Any, **more: Any) -> Answer:
    """The same for a completion."""
    watch = Stopwatch()
    found = ask(server, "POST", "/v1/completions", body, **more)
    assert watch.lap() < HONEST_SECONDS
    return found


def until(condition: Any, seconds: float = 60.0) -> None:
    """Wait for a condition."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.01)


class Stream(threading.Thread):
    """An honest client's stream, with the longest pause between two of its events in seconds, as a
    `Stopwatch` measures it."""

    def __init__(self, server: LiveServer, body: dict[str, Any], key: str | None = None) -> None:
        super().__init__(daemon=True)
        self.headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self.url, self.body = server.url + "/v1/completions", body | {"stream": True}
        self.begun = threading.Event()
        self.longest_pause = 0.0
        self.text, self.whole = "", False
        self.start()

    def run(self) -> None:
        """Read the stream to its end."""
        with httpx2.stream(
            "POST", self.url, json=self.body, headers=self.headers, timeout=60
        ) as answer:
            watch = Stopwatch()
            for line in answer.iter_lines():
                if not line.startswith("data: "):
                    continue
                pause = watch.lap()
                if self.begun.is_set():
                    self.longest_pause = max(self.longest_pause, pause)
                self.begun.set()
                if line == "data: [DONE]":
                    self.whole = True
                else:
                    self.text += json.loads(line[6:])["choices"][0]["text"]
