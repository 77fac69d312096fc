"""Requests that take hours or gigabytes: they end, nobody else waits, and no process is left.

| attack | answer | bounds |
| --- | --- | --- |
| schemas that compile for hours | 400 or 503 | honest clients 3 s, the loop's pause 0.2 s |
| a conversation that the chat template takes minutes for | 400 or 503 | likewise |
| a grammar whose masks take long, for many samples | 200 or 400 | honest clients 3 s |
| texts that fit no prompt, wherever a request can have one | 400 | the loop's pause 0.2 s |
| SIGTERM meanwhile (test_sigterm) | exit status 0 | 10 s |
"""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import pytest

from rjax.serve.config.limits import ServeLimits

from .live_server import LiveServer, live_server, make_engine, zygote
from .watch import HONEST, HONEST_SECONDS, best_of_two, check_memory, resident, watched

PATTERNS = {"patternProperties": {f"^(a|b)*{i}_{j}$": {} for i in range(40) for j in range(50)}}
BOMB = {**HONEST, "structured_outputs": {"json": {"type": "object", **PATTERNS}}}
CUBIC = (
    "{% for a in messages %}{% for b in messages %}{% for c in messages %}{% for d in messages %}"
    "{% endfor %}{% endfor %}{% endfor %}{% endfor %}"
    "{% for m in messages %}{{ m['content'] }}{% endfor %}"
)
LONG = "a" * 3_000_000


def attack(
    server: LiveServer, path: str, body: dict, times: int
) -> tuple[list[httpx2.Response], float]:
    """The answers to several requests at once, and an honest client's slowest beside them."""
    url = server.url + path
    with watched(server, honest=True) as found, ThreadPoolExecutor(times) as pool:
        answers = list(pool.map(lambda _: httpx2.post(url, json=body, timeout=120), range(times)))
    assert found.pause < 1.0
    return answers, found.honest


def check(answers: list[httpx2.Response]) -> None:
    """Each request is at fault, or is asked to come again."""
    for answer in answers:
        code = answer.json()["error"]["code"]
        assert (answer.status_code, code) in ((400, "too_slow"), (503, "overloaded"))
        assert answer.status_code == 400 or int(answer.headers["retry-after"]) >= 1
    assert any(answer.status_code == 400 for answer in answers)


@pytest.fixture(scope="module")
def small(folder):
    """A server with a costly chat template."""
    limits = ServeLimits(grammar_seconds=2.0, template_seconds=2.0, slow_tasks=2)
    with live_server(make_engine(folder, chat_template=CUBIC), limits=limits) as found:
        httpx2.post(found.url + "/v1/completions", json=HONEST, timeout=120)
        yield found


def test_endless_compiles_hold_up_nobody(small: LiveServer):
    before = resident()

    def slowest() -> float:
        answers, honest = attack(small, "/v1/completions", BOMB, 4)
        check(answers)
        return honest

    best_of_two(slowest, HONEST_SECONDS)
    check_memory(before)
    easy = {**HONEST, "structured_outputs": {"regex": "[ab]{2}"}}
    assert httpx2.post(small.url + "/v1/completions", json=easy, timeout=60).status_code == 200


@pytest.mark.thorough
def test_an_endless_template_holds_up_nobody(small: LiveServer):
    body = {"messages": [{"role": "user", "content": "a"}] * 300, "max_tokens": 1}

    def slowest() -> float:
        answers, honest = attack(small, "/v1/chat/completions", body, 6)
        check(answers)
        return honest

    best_of_two(slowest, HONEST_SECONDS)
    one = {**body, "messages": body["messages"][:1]}
    url = small.url + "/v1/chat/completions"
    assert httpx2.post(url, json=one, timeout=60).status_code == 200


def test_no_worker_is_left(small: LiveServer):
    """What was killed is gone; a worker that waits is kept for each place at most."""
    limits = small.service.limits
    end = time.monotonic() + 60
    idle = len(small.service.texts._idle) + len(small.service.compilers._idle)
    assert idle <= limits.text_workers + limits.grammar_workers
    busy = [pid for pid in _worker_pids() if _state(pid) == "R"]
    while busy and time.monotonic() < end:
        time.sleep(0.1)
        busy = [pid for pid in busy if _state(pid) == "R"]
    assert not busy


def _worker_pids() -> list[int]:
    pid = zygote()._process.pid
    return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return "gone"


@pytest.mark.thorough
def test_slow_masks_hold_up_nobody(server: LiveServer):
    schema = {"type": "object", "properties": {f"p{i}": {} for i in range(3000)}}
    body = {**HONEST, "n": 64, "temperature": 1.5, "max_tokens": 100}

    def slowest() -> float:
        answers, honest = attack(
            server, "/v1/completions", {**body, "structured_outputs": {"json": schema}}, 1
        )
        assert answers[0].status_code in (200, 400), answers[0].text
        return honest

    best_of_two(slowest, HONEST_SECONDS)
    server.wait_idle()


@pytest.mark.parametrize(
    "more",
    [
        {"messages": [{"role": "user", "content": LONG}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": LONG}]}]},
        {"messages": [{"role": "user", "content": "a", "name": LONG}]},
        {"messages": [{"role": "assistant", "tool_calls": [
            {"id": "a", "function": {"name": "f", "arguments": LONG}}]}]},
        {"tools": [{"type": "function", "function": {"name": "f", "description": LONG}}]},
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {
            "properties": {LONG: {}}}}}]},
        {"chat_template_kwargs": {"a": LONG}},
    ],
    ids=["content", "part", "name", "arguments", "description", "parameters", "kwargs"],
)  # fmt: skip
def test_every_text_of_a_request_is_counted(server: LiveServer, more: dict):
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, **more}

    def pause() -> float:
        with watched(server) as found:
            answer = httpx2.post(server.url + "/v1/chat/completions", json=body, timeout=60)
        assert answer.status_code == 400
        assert "characters" in answer.json()["error"]["message"]
        return found.pause

    best_of_two(pause, 0.2)
