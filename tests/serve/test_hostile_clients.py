"""Each attack: honest clients are answered, the event loop turns, memory and shares come back.

The bounds are those of `tests.serve.hostile`.
"""

import asyncio
import contextlib
import http.client
import itertools
import json
import resource
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest

from rjax.errors import InvalidConfigError
from rjax.serve.config.limits import ServeLimits
from rjax.serve.http import server as server_module
from tests.slow_steps import slow_steps

from .hostile import (
    ELSEWHERE,
    HONEST_SECONDS,
    REFUSED_SECONDS,
    SHORT,
    Answer,
    Stream,
    ask,
    connect,
    ended,
    get,
    post,
    raw_post,
    until,
    watched,
)
from .live_server import LiveServer, live_server, make_engine

SLOTS = 4
LONG = {"prompt": "a", "max_tokens": 120, "ignore_eos": True, "temperature": 0}


@contextlib.contextmanager
def slowed(server: LiveServer, seconds: float) -> Iterator[None]:
    """Steps take longer, as those of a large model do."""
    with slow_steps(server.service.engine.engine, seconds):
        yield


@contextlib.contextmanager
def counted_steps(server: LiveServer) -> Iterator[list[int]]:
    """Collects how many steps lie between each two outputs of a request that follow each other."""
    engine, between, last = server.service.engine.engine, [], {}
    step, number = engine.step, itertools.count()

    def counted():
        outputs, now = step(), next(number)
        for output in outputs:
            if output.request_id in last:
                between.append(now - last[output.request_id])
            last[output.request_id] = now
        return outputs

    engine.step = counted
    try:
        yield between
    finally:
        del engine.step


@pytest.fixture(scope="module")
def small(folder) -> Iterator[LiveServer]:
    limits = ServeLimits(
        heartbeat_seconds=1.0, queued_sequences=40, send_seconds=1.5, unread_tokens=2000
    )
    with live_server(make_engine(folder), limits=limits, send_buffer=8192) as found:
        assert complete(found, SHORT).status == 200
        assert complete(found, {**SHORT, "logprobs": 20}).status == 200
        yield found


def complete(server: LiveServer, body: dict) -> Answer:
    """A request that may take as long as it likes."""
    return ask(server, "POST", "/v1/completions", body)


def register(server: LiveServer, name: str) -> Answer:
    body = {"name": name, "prompt": f"{name} Answer from this table and nothing else. " * 3}
    return ask(server, "POST", "/v1/prefixes", body)


@pytest.mark.thorough
def test_prefixes_wait_their_turn_while_streams_go_on(small: LiveServer):
    """The queue has room for 40: four streams, and 36 of 45 prefixes."""
    small.wait_idle()
    with watched(small), ThreadPoolExecutor(45) as pool, counted_steps(small) as between:
        with slowed(small, 0.02):  # eight seconds at least, if it were to the end
            streams = [Stream(small, {**LONG, "max_tokens": 400}) for _ in range(SLOTS)]
            for stream in streams:
                assert stream.begun.wait(60)
            start = time.monotonic()
            prefixes = [pool.submit(register, small, f"p{i}") for i in range(45)]
            while time.monotonic() < start + 2 or sum(p.done() for p in prefixes) < 9:
                assert get(small, "/health").json == {"status": "ready"}
                assert get(small, "/v1/prefixes").status == 200
                time.sleep(0.1)
            assert all(stream.is_alive() for stream in streams)
        for stream in streams:
            stream.join(60)
        codes = [found.result().status for found in prefixes]
    assert all(stream.whole for stream in streams)
    assert len(between) >= SLOTS * 399
    assert max(between) <= 2, "a stream waited for the tokens of prefixes"
    assert codes.count(200) == 36
    assert codes.count(503) == 9
    names = [card["name"] for card in get(small, "/v1/prefixes").json["data"]]
    assert len(names) == 36
    for name in names:
        assert ask(small, "DELETE", f"/v1/prefixes/{name}").status == 200
    small.wait_idle()
    assert small.used_bytes() == 0


def test_a_registration_is_cancelled_with_its_client(small: LiveServer):
    small.wait_idle()
    assert register(small, "kept").status == 200
    before = get(small, "/v1/prefixes/kept").json
    with slowed(small, 0.03):  # 14 seconds, if it were to the end
        streams = [Stream(small, {**LONG, "max_tokens": 480}) for _ in range(SLOTS)]
        for stream in streams:
            assert stream.begun.wait(60)
        for name in ("new", "kept"):
            body = {"name": name, "prompt": "another one " * 20}
            with connect(small) as link:
                link.sendall(raw_post("/v1/prefixes", body))
                until(lambda: small.service.engine.num_live == SLOTS + 1)
            until(lambda: small.service.engine.num_live == SLOTS)
    for stream in streams:
        stream.join(60)
    assert get(small, "/v1/prefixes").json["data"] == [before]
    assert [p.name for p in small.call(lambda engine: engine.prefixes())] == ["anyone/kept"]
    assert ask(small, "DELETE", "/v1/prefixes/kept").status == 200
    small.wait_idle()
    assert small.used_bytes() == 0


def test_a_reader_that_stops_gives_its_share_back_and_is_cut(small: LiveServer):
    """Its 36 sequences leave room for four; the answer is 400 KB and no more than 90 KB are on
    their way."""
    small.wait_idle()
    body = {**LONG, "prompt": ["a"] * 36, "max_tokens": 50, "stream": True}
    with watched(small), connect(small, receive_buffer=4096) as link:
        link.sendall(raw_post("/v1/completions", body))
        until(lambda: small.service.engine.num_live == 36)
        assert complete(small, {**LONG, "prompt": ["a"] * 5}).status == 503
        until(lambda: not small.call(lambda engine: engine.has_unfinished_requests()))
        # The engine is idle: the whole queue is there for others, whoever reads or does not.
        others = {**SHORT, "prompt": ["a"] * 40, "max_tokens": 1}
        assert complete(small, others).status == 200
        until(lambda: small.service.engine.num_live == 0)
        until(lambda: len(small.server._open) == 0)
        assert ended(link, 60) is not None
    small.wait_idle()
    assert small.used_bytes() == 0


def test_tokens_that_wait_for_a_reader_are_bounded(small: LiveServer):
    """2,000 may wait, each alternative counting as one: of 8 x 60 x 21 most are never made."""
    small.wait_idle()
    before = small.call(lambda engine: engine.stats()).output_tokens
    body = {**LONG, "prompt": ["a"] * 8, "max_tokens": 60, "stream": True, "logprobs": 20}
    with connect(small, receive_buffer=4096) as link:
        link.sendall(raw_post("/v1/completions", body))
        until(lambda: small.service.engine.num_live == 8)
        small.wait_idle()
        made = small.call(lambda engine: engine.stats()).output_tokens - before
        assert made < 300
    assert small.used_bytes() == 0


@pytest.mark.thorough
def test_an_answer_that_is_never_read_is_dropped(small: LiveServer):
    small.wait_idle()
    until(lambda: len(small.server._open) == 0)
    body = {**LONG, "prompt": ["a"] * 4, "max_tokens": 60, "logprobs": 20}
    with watched(small), connect(small, receive_buffer=4096) as link:
        link.sendall(raw_post("/v1/completions", body))
        until(lambda: len(small.server._open) == 1)
        small.wait_idle()
        until(lambda: len(small.server._open) == 0)
        found = ended(link, 60)
        assert found is not None and len(found) < 200_000


@pytest.mark.thorough
def test_slow_readers_get_all_of_their_stream(small: LiveServer):
    """Slower than the engine, and faster than 16 KiB in ``send_seconds``."""
    small.wait_idle()
    body = {**LONG, "prompt": ["a"] * 8, "max_tokens": 50, "stream": True}
    alone = complete(small, {**body, "stream": False})
    texts = dict.fromkeys(range(8), "")
    with httpx2.stream("POST", small.url + "/v1/completions", json=body, timeout=60) as answer:
        for i, line in enumerate(answer.iter_lines()):
            if line.startswith("data: {"):
                [choice] = json.loads(line[6:])["choices"]
                texts[choice["index"]] += choice["text"]
            if i % 100 == 0:
                time.sleep(0.1)
    assert list(texts.values()) == [choice["text"] for choice in alone.json["choices"]]


@pytest.fixture(scope="module")
def narrow(folder) -> Iterator[LiveServer]:
    limits = ServeLimits(
        connections=30,
        open_connections=60,
        address_connections=40,
        health_connections=4,
        header_seconds=1.5,
        body_seconds=2.5,
    )
    with live_server(make_engine(folder), limits=limits) as found:
        assert complete(found, SHORT).status == 200
        yield found


def test_silent_connections_keep_nobody_out(narrow: LiveServer):
    """Three times as many as may be open, from one address and from another.

    The loop accepts them in groups, whose work the checks of types in tests make several times as
    long as it is in a server.
    """
    with watched(narrow, 0.5), contextlib.ExitStack() as stack:
        links = [stack.enter_context(connect(narrow, ELSEWHERE)) for _ in range(180)]
        until(lambda: len(narrow.server._open) >= 40)
        for source in ("127.0.0.1", ELSEWHERE, "127.0.0.3"):
            assert get(narrow, "/health", source=source).json == {"status": "ready"}
            assert post(narrow, SHORT, source=source).status == 200
        assert len(narrow.server._open) <= 60
        links += [stack.enter_context(connect(narrow, f"127.0.1.{i}")) for i in range(1, 180)]
        assert get(narrow, "/health").json == {"status": "ready"}
        assert post(narrow, SHORT).status == 200
        assert len(narrow.server._open) <= 60
        for link in links:
            assert ended(link, 60) == b""
    until(lambda: len(narrow.server._open) == 0)


def test_a_request_that_is_here_keeps_its_place(narrow: LiveServer):
    """More silent connections than may be open come after it in the same turn of the loop."""
    request = b"GET /health HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
    with contextlib.ExitStack() as stack:
        blocked = threading.Event()
        narrow.loop.call_soon_threadsafe(blocked.wait)
        honest = stack.enter_context(connect(narrow))
        honest.sendall(request)
        for i in range(100):
            stack.enter_context(connect(narrow, f"127.0.4.{i + 1}"))
        blocked.set()
        answer = ended(honest, 60)
        assert answer is not None and answer.startswith(b"HTTP/1.1 200")


def test_those_with_most_silent_connections_lose_them(narrow: LiveServer):
    """Not whoever connected first and is slow to send."""
    with contextlib.ExitStack() as stack:
        slow = stack.enter_context(connect(narrow))
        for i in range(200):
            stack.enter_context(connect(narrow, f"127.0.5.{i // 8 + 1}"))
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0.3), narrow.loop).result(60)
        slow.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        answer = ended(slow, 60)
        assert answer is not None and answer.startswith(b"HTTP/1.1 200")


def test_addresses_that_had_answers_keep_their_silent_connections(narrow: LiveServer):
    """Even if they have more of them than each of many others."""
    assert get(narrow, "/health").json == {"status": "ready"}
    with contextlib.ExitStack() as stack:
        slow = [stack.enter_context(connect(narrow)) for _ in range(10)]
        for i in range(200):
            stack.enter_context(connect(narrow, f"127.0.6.{i + 1}"))
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0.3), narrow.loop).result(60)
        for link in slow:
            link.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
            answer = ended(link, 60)
            assert answer is not None and answer.startswith(b"HTTP/1.1 200")


def test_slow_headers_have_a_deadline(narrow: LiveServer):
    """At the first request and at a later one of the connection."""
    head = b"GET /v1/models HTTP/1.1\r\nHost: a\r\n"
    for before in (b"", head + b"\r\n"):
        with connect(narrow) as link, contextlib.suppress(ConnectionError):
            link.sendall(before)
            if before:
                answer = b""
                while not answer.endswith(b"]}"):
                    answer += link.recv(65536)
            start, found = time.monotonic(), b""
            for byte in head * 100:
                link.sendall(bytes([byte]))
                link.settimeout(0.1)
                with contextlib.suppress(TimeoutError):
                    found = link.recv(65536)
                    break
            assert found.startswith(b"HTTP/1.1 408")
            assert time.monotonic() - start < 60, "it would send for six minutes"


@pytest.mark.thorough
def test_busy_connections_leave_health_its_own(narrow: LiveServer):
    """Bodies that never come keep as many requests under way as may be; they have a deadline."""
    part = raw_post("/v1/completions", SHORT)[:-5]
    with watched(narrow), contextlib.ExitStack() as stack:
        links = []
        for i in range(2):
            for _ in range(30):
                links.append(stack.enter_context(connect(narrow, f"127.0.2.{i + 1}")))
                with contextlib.suppress(ConnectionError):
                    links[-1].sendall(part)
        until(lambda: len(narrow.server._open) >= 30)
        assert get(narrow, "/health").json == {"status": "ready"}
        for i in range(20):  # more than there are such connections: each is closed after it
            path = "/ping" if i % 2 else "/health"
            assert get(narrow, path).json == {"status": "ready"}
        until(lambda: _answered(narrow))
    until(lambda: len(narrow.server._open) == 0)


def _answered(server: LiveServer) -> bool:
    try:
        return post(server, SHORT).status == 200
    except (OSError, http.client.HTTPException):
        return False


def test_where_all_are_busy_only_health_is_answered(folder):
    limits = ServeLimits(open_connections=5, address_connections=5, health_connections=2)
    part = raw_post("/v1/completions", SHORT)[:-5]
    with live_server(make_engine(folder), limits=limits) as tiny, contextlib.ExitStack() as stack:
        for _ in range(5):
            stack.enter_context(connect(tiny)).sendall(part)
        until(lambda: len(tiny.server._open._all.members["busy"]) == 5)
        for _ in range(5):
            stack.enter_context(connect(tiny))  # silent ones make room here too
        for path in ("/health", "/ping", "/health", "/ping", "/health"):
            assert get(tiny, path).json == {"status": "ready"}
            refused = get(tiny, "/v1/models")
            assert refused.status == 503
            assert refused.json["error"]["code"] == "overloaded"
            assert refused.headers["retry-after"] == "2"


@pytest.mark.thorough
def test_a_flood_of_commands_does_not_stop_streams(small: LiveServer):
    small.wait_idle()
    stop = threading.Event()

    def flood() -> None:
        while not stop.is_set():
            assert ask(small, "GET", "/metrics").status == 200

    with watched(small), ThreadPoolExecutor(8) as pool:
        asking = [pool.submit(flood) for _ in range(8)]
        stream = Stream(small, LONG)
        stream.join(60)
        stop.set()
        for found in asking:
            found.result()
    assert stream.whole
    assert stream.longest_pause < HONEST_SECONDS


def test_refusals_hold_up_the_loop_for_little(small: LiveServer):
    """Bodies of the largest size, refused each."""
    small.wait_idle()
    body = {"name": "x" * 10**6, "prompt": [1] * 2 * 10**6}
    with watched(small, REFUSED_SECONDS):
        found = ask(small, "POST", "/v1/prefixes", body)
    assert found.status == 400


def test_connections_are_no_more_than_the_files_of_the_process(monkeypatch):
    limits, had = ServeLimits(open_connections=500), [(300, 400)]
    monkeypatch.setattr(resource, "getrlimit", lambda kind: had[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda kind, new: had.append(new))
    assert server_module._max_open_connections(limits) == 300 - 128 - 16
    server_module.set_ulimit(limits)
    assert had[-1] == (400, 400)
    had.append((300, 10**6))
    server_module.set_ulimit(limits)
    assert had[-1] == (500 + 128 + 16, 10**6)
    assert server_module._max_open_connections(limits) == 500
    server_module.set_ulimit(limits)
    assert len(had) == 4
    had.append((100, 100))
    with pytest.raises(InvalidConfigError, match="raise ulimit -n"):
        server_module._max_open_connections(limits)
