"""Two API keys: nothing that one is told, nor how soon, depends on what the other sent."""

import random
import statistics
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from rjax.serve.config.limits import ServeLimits

from .hostile import Answer, Stream, ask
from .live_server import OPTIONS, LiveServer, live_server, make_engine

ANNE, BERT = "first-key-1234", "second-key-5678"
RULES = "Answer from this table and nothing else. " * 4


@pytest.fixture(scope="module")
def server(folder) -> Iterator[LiveServer]:
    limits = ServeLimits(prefixes=3, queued_sequences=12, queued_tokens=2000)
    # Beside a sequence of full length there is room for 64 pages of prefixes.
    with live_server(make_engine(folder, num_pages=128), keys=[ANNE, BERT], limits=limits) as found:
        yield found


@pytest.fixture(autouse=True)
def _forget(server: LiveServer) -> Iterator[None]:
    server.wait_idle()
    yield
    for key in (ANNE, BERT):
        for card in ask(server, "GET", "/v1/prefixes", key=key).json["data"]:
            ask(server, "DELETE", f"/v1/prefixes/{card['name']}", key=key)
    server.wait_idle()
    assert server.used_bytes() == 0


def complete(server: LiveServer, key: str, prompt: Any, **more: Any) -> Answer:
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, **more}
    return ask(server, "POST", "/v1/completions", body, key=key)


def cached(answer: Answer) -> int:
    assert answer.status == 200, answer.body
    return answer.json["usage"]["prompt_tokens_details"]["cached_tokens"]


def random_prompt(draw: random.Random, length: int) -> list[int]:
    return [draw.randrange(10, 200) for _ in range(length)]


@pytest.mark.thorough
def test_cached_tokens_and_steps_are_those_of_a_prompt_that_nobody_sent(server: LiveServer):
    """Whole, in part, and as the beginning of a longer one; with a salt of the client's or none."""
    draw = random.Random(1)

    def work(key: str, prompt: list[int], **more: Any) -> tuple[int, int]:
        """Cached tokens, and steps: how long a request takes is how many steps it needs."""
        server.wait_idle()
        before = server.call(lambda engine: engine.stats()).steps
        found = cached(complete(server, key, prompt, **more))
        server.wait_idle()
        return found, server.call(lambda engine: engine.stats()).steps - before

    for length in (1, 8, 17, 65, 400):
        secret = random_prompt(draw, length)
        salt: dict[str, Any] = {} if length % 2 else {"cache_salt": "mine"}
        for guess in (secret, secret[: length // 2 + 1], [*secret, 11]):
            work(ANNE, secret)
            work(ANNE, secret, **salt)
            assert work(ANNE, [*secret, 12], **salt)[0] > length // 2, "it is there to be found"
            never_sent = [230 + draw.randrange(9), *random_prompt(draw, len(guess) - 1)]
            assert work(BERT, guess, **salt) == work(BERT, never_sent, **salt)
            server.used_bytes()  # forgets all that is cached


@pytest.mark.slow
def test_how_soon_an_answer_comes_tells_nothing(server: LiveServer):
    draw = random.Random(2)
    complete(server, BERT, random_prompt(draw, 480))  # compiles

    def seconds(key: str, prompt: list[int]) -> float:
        start = time.monotonic()
        assert complete(server, key, prompt).status == 200
        return time.monotonic() - start

    own, others, fresh = [], [], []
    for _ in range(7):
        secret = random_prompt(draw, 480)
        complete(server, ANNE, secret)
        own.append(seconds(ANNE, secret))
        others.append(seconds(BERT, secret))
        fresh.append(seconds(BERT, random_prompt(draw, 480)))
    own_time, others_time, fresh_time = map(statistics.median, (own, others, fresh))
    assert own_time < 0.6 * fresh_time, "the measurement would show a cached prompt"
    assert 0.6 * fresh_time < others_time < 1.7 * fresh_time


def test_a_name_of_the_other_is_a_name_that_nobody_has(server: LiveServer):
    for name, pinned in (("pinned", True), ("loose", False)):
        body = {"name": name, "prompt": RULES, "pin": pinned}
        assert ask(server, "POST", "/v1/prefixes", body, key=ANNE).status == 200

    def all_of(name: str) -> list[tuple[int, str]]:
        use: dict[str, Any] = {"prompt": "a", "max_tokens": 1, "prefix": name}
        tries: list[tuple[str, str, Any]] = [
            ("GET", f"/v1/prefixes/{name}", None),
            ("DELETE", f"/v1/prefixes/{name}", None),
            ("PATCH", f"/v1/prefixes/{name}", {"pin": True}),
            ("PATCH", f"/v1/prefixes/{name}", {"pin": False}),
            ("POST", "/v1/completions", use),
            ("POST", "/v1/completions", {**use, "stream": True}),
            ("GET", "/v1/prefixes", None),
        ]
        found = [ask(server, method, path, body, key=BERT) for method, path, body in tries]
        return [(a.status, a.body.decode().replace(name, "NAME")) for a in found]

    nobodys = all_of("nobodys")
    assert [status for status, _ in nobodys] == [404] * 6 + [200]
    for name in ("pinned", "loose", "key-1/pinned", "../key-1/pinned", "key-1%2Fpinned"):
        shown = all_of(name)
        if "/" not in name and "%" not in name:
            assert shown == nobodys
        assert all("data" not in text or '"data":[]' in text for _, text in shown)
    # Names are each tenant's own, and so is their number.
    for i in range(2):
        body = {"name": f"more{i}", "prompt": "a b c"}
        ask(server, "POST", "/v1/prefixes", body, key=ANNE)
    body = {"name": "pinned", "prompt": "quite another"}
    assert ask(server, "POST", "/v1/prefixes", body, key=BERT).status == 200
    kept = ask(server, "GET", "/v1/prefixes/pinned", key=ANNE).json
    assert kept["num_tokens"] > 20
    assert cached(complete(server, BERT, RULES)) <= 1  # of his own, which begins as all texts


@pytest.mark.parametrize("pages", [20, 50])
def test_want_of_room_does_not_tell_how_much_the_other_keeps(server: LiveServer, pages):
    draw = random.Random(3)
    held = {"name": "held", "prompt": random_prompt(draw, pages * OPTIONS["page_size"])}
    assert ask(server, "POST", "/v1/prefixes", held, key=ANNE).status == 200
    wanted = {"name": "wanted", "prompt": random_prompt(draw, 50 * OPTIONS["page_size"])}
    found = ask(server, "POST", "/v1/prefixes", wanted, key=BERT)
    assert found.status == 409
    assert found.json["error"]["message"] == (
        "there is no room to keep 400 more tokens; drop a prefix, or register it with pin false"
    )


@pytest.mark.sample(1)
@pytest.mark.parametrize("length", [30, 400])
def test_a_full_queue_does_not_tell_how_long_the_others_prompts_are(server: LiveServer, length):
    engine: Any = server.service.engine.engine
    step, goes_on = engine.step, threading.Event()

    def held():
        assert goes_on.wait(60)
        return step()

    goes_on.set()
    engine.step = held
    prompt = random_prompt(random.Random(4), length)
    body = {"prompt": prompt, "max_tokens": 60, "ignore_eos": True, "temperature": 0}
    stream = Stream(server, body, key=ANNE)
    try:
        assert stream.begun.wait(60)
        goes_on.clear()
        many = complete(server, BERT, ["a"] * 12)
        long = complete(server, BERT, [[1] * 330] * 6)
    finally:
        goes_on.set()
        del engine.step
        stream.join(60)
    assert many.json["error"]["message"] == (
        "the queue, of at most 12 sequences, has no room for the 12 of this request; try again "
        "later"
    )
    assert long.json["error"]["message"] == (
        "the queue, of at most 2000 prompt tokens, has no room for the 1980 of this request; try "
        "again later"
    )
