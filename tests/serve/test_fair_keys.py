"""Two API keys: one that asks for all leaves the other its rows and its part of the queue."""

import contextlib
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from .hostile import SHORT, ask, connect, post, raw_post, until
from .live_server import LiveServer, live_server, make_engine
from .test_hostile_clients import slowed

ANNE, BERT = "first-key-12345678", "second-key-1234567"
FIRST = -(2**31)  # the most urgent priority that fits into 32 bits
LONG = {"prompt": ["a"] * 4, "max_tokens": 400, "ignore_eos": True, "stream": True}
GREEDY = LONG | {"n": 64}


@pytest.fixture(scope="module")
def server(folder) -> Iterator[LiveServer]:
    with live_server(make_engine(folder), keys=[ANNE, BERT]) as found:
        compiles = [SHORT, SHORT | {"n": 2, "temperature": 1}, SHORT | {"prompt": ["b"] * 4}]
        for body in compiles:
            assert ask(found, "POST", "/v1/completions", body, key=ANNE).status == 200
        yield found


@contextlib.contextmanager
def streams(server: LiveServer, body: dict, key: str, count: int) -> Iterator[list[int]]:
    """Streams of which only the status is read."""
    with contextlib.ExitStack() as stack:
        links = [stack.enter_context(connect(server)) for _ in range(count)]
        for link in links:
            link.sendall(raw_post("/v1/completions", body, key))
        yield sorted(int(link.recv(12).split()[1]) for link in links)


def rows(server: LiveServer) -> Counter[str]:
    """Running sequences of each key."""
    return server.call(lambda engine: Counter(s.share for s in engine._scheduler.running))


def test_four_streams_of_256_sequences_leave_another_key_its_share(server: LiveServer):
    server.wait_idle()
    with slowed(server, 0.02), streams(server, GREEDY, ANNE, 4) as statuses:
        assert statuses == [200, 200, 503, 503], "half of 1,024"
        until(lambda: rows(server).total() == 4)
        for _ in range(3):
            assert post(server, SHORT, key=BERT).status == 200
        fair = {"key-1": 2, "key-2": 2}
        body = GREEDY | {"n": 16}
        with streams(server, body, BERT, 4) as others:
            assert others == [200, 200, 200, 200], "half of what the first leaves"
            until(lambda: rows(server) == fair)
            for _ in range(20):
                assert rows(server) == fair
                time.sleep(0.02)
    server.wait_idle()
    assert server.used_bytes() == 0


@pytest.mark.thorough
def test_a_priority_does_not_hold_up_another_key(server: LiveServer):
    """Neither while its requests run nor while many of them wait."""
    server.wait_idle()
    body = LONG | {"prompt": ["a"] * 100, "priority": FIRST}
    with slowed(server, 0.02), streams(server, body, ANNE, 2) as statuses:
        assert statuses == [200, 200]
        until(lambda: rows(server).total() == 4)
        for priority in (0, 2**31 - 1):
            mine = SHORT | {"priority": priority}
            assert post(server, mine, key=BERT).status == 200
    server.wait_idle()


@pytest.mark.thorough
def test_the_operator_may_order_all_keys_by_priority(folder):
    """The one that came first, and has no row, goes last."""
    ended = []

    def complete(key: str, priority: int) -> None:
        body = SHORT | {"priority": priority}
        assert ask(server, "POST", "/v1/completions", body, key=key).status == 200
        ended.append(key)

    def waiting() -> int:
        return server.call(lambda engine: len(engine._scheduler.waiting))

    with (
        live_server(
            make_engine(folder, max_num_seqs=1), keys=[ANNE, BERT], priority_across_keys=True
        ) as server,
        slowed(server, 0.02),
        ThreadPoolExecutor(2) as pool,
    ):
        with streams(server, LONG | {"prompt": "a"}, ANNE, 1) as statuses:
            assert statuses == [200]
            until(lambda: rows(server) == {None: 1})
            asked = [pool.submit(complete, BERT, 0)]
            until(lambda: waiting() == 1)
            asked.append(pool.submit(complete, ANNE, FIRST))
            until(lambda: waiting() == 2)
            time.sleep(0.5)
            assert waiting() == 2
        for found in asked:
            found.result()
        server.wait_idle()
    assert ended == [ANNE, BERT]
