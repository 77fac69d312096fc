"""kill -TERM under load: what was accepted is answered in full, what comes later gets a 503. Ctrl-C
ends at once."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx2
import pytest

from .live_server import OPTIONS

BODY = {
    "prompt": "Who lives in Peru?",
    "max_tokens": 150,
    "ignore_eos": True,
    "temperature": 1,
    "stream": True,
}
SOON = 40.0  # seconds; the promise is one, and the machine may be busy
SIZES = ("page_size", "num_pages", "max_num_seqs", "max_num_batched_tokens")


@pytest.fixture
def process(folder, request):
    cache = str(request.config.cache.mkdir("jax"))  # what other tests compiled
    command = [
        *(sys.executable, "-m", "rjax.serve", "--model", str(folder), "--load-format", "dummy"),
        *("--port", "0", "--drain-seconds", "300", "--warmup", "off"),
        *(f"--{name.replace('_', '-')}={OPTIONS[name]}" for name in SIZES),
    ]
    environment = {**os.environ, "JAX_COMPILATION_CACHE_DIR": cache}
    environment["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.1"
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # children inherit SIG_IGN
    started = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    signal.signal(signal.SIGINT, before)
    try:
        assert started.stdout is not None
        line = started.stdout.readline()
        assert "http://127.0.0.1:" in line
        yield started, line.split(" on ")[1].strip().removesuffix("/v1")
    finally:
        started.kill()
        started.wait(60)
        started.stdout.close()


def stream(url: str, found: list, accepted: threading.Semaphore, **more) -> None:
    """One client; adds what it got: (status, tokens, finished)."""
    tokens, finished, body = 0, False, BODY | {"return_token_ids": True} | more
    with httpx2.stream("POST", url + "/v1/completions", json=body, timeout=300) as answer:
        if answer.status_code == 200:
            accepted.release()
        for line in answer.iter_lines():
            if line == "data: [DONE]":
                finished = True
            elif line.startswith("data: {"):
                choices = json.loads(line[6:]).get("choices")
                tokens += len(choices[0]["token_ids"]) if choices else 0
        found.append((answer.status_code, tokens, finished))


def compile_for_hours(url: str) -> None:
    """A request whose grammar can be compiled, but not in time."""
    patterns = {f"^(a|b)*{i}_{j}$": {} for i in range(40) for j in range(50)}
    schema = {"type": "object", "patternProperties": patterns}
    body = {"prompt": "a", "structured_outputs": {"json": schema}}
    with contextlib.suppress(httpx2.TransportError):
        httpx2.post(url + "/v1/completions", json=body, timeout=60)


@pytest.mark.thorough
def test_drain_loses_nothing_that_was_accepted(process):
    started, url = process
    found: list = []
    accepted = threading.Semaphore(0)
    clients = [threading.Thread(target=stream, args=(url, found, accepted)) for _ in range(8)]
    for client in clients:
        client.start()
    for _ in clients:
        assert accepted.acquire(timeout=120)
    bombs = [threading.Thread(target=compile_for_hours, args=(url,)) for _ in range(4)]
    for bomb in bombs:
        bomb.start()
    time.sleep(0.5)
    os.kill(started.pid, signal.SIGTERM)
    refused = 0
    end = time.monotonic() + 60
    while time.monotonic() < end and not refused:
        try:
            health = httpx2.get(url + "/health", timeout=60)
            late = httpx2.post(url + "/v1/completions", json=BODY | {"stream": False}, timeout=300)
        except httpx2.TransportError:
            break  # it has finished and gone
        if health.status_code == 503:
            assert health.json() == {"status": "draining"}
            assert late.status_code == 503
            assert late.headers["retry-after"]
            refused += 1
    for client in clients:
        client.join(300)
    assert len(found) == 8
    assert all(status == 200 and finished for status, _, finished in found)
    assert all(tokens >= 149 for _, tokens, _ in found)
    assert started.wait(SOON) == 0, "a request that was not accepted kept the process"
    for bomb in bombs:
        bomb.join(60)


@pytest.mark.slow
def test_second_signal_ends_at_once(process):
    started, url = process
    found: list = []
    accepted = threading.Semaphore(0)

    def client() -> None:
        try:
            stream(url, found, accepted, max_tokens=490)
        except httpx2.TransportError:
            found.append("cut")

    threads = [threading.Thread(target=client) for _ in range(6)]
    for thread in threads:
        thread.start()
    assert accepted.acquire(timeout=120)
    os.kill(started.pid, signal.SIGTERM)
    while httpx2.get(url + "/health", timeout=60).status_code != 503:
        pass  # the signal is not taken yet, and a second one would be lost in it
    os.kill(started.pid, signal.SIGTERM)
    assert started.wait(60) == 0
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    whole = [answer for answer in found if answer != "cut" and answer[2]]
    assert len(whole) < 6, "all were answered in full, as after one signal"


def children(pid: int) -> list[int]:
    """Processes that this one started."""
    return [int(x) for x in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_alive(pid: int) -> bool:
    """Whether a process runs. A zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.slow
def test_ctrl_c_under_load_ends_at_once(process):
    started, url = process
    found: list = []
    accepted = threading.Semaphore(0)

    def client() -> None:
        with contextlib.suppress(httpx2.TransportError):
            stream(url, found, accepted, max_tokens=490)

    threads = [threading.Thread(target=client) for _ in range(6)]
    for thread in threads:
        thread.start()
    assert accepted.acquire(timeout=120)
    workers = children(started.pid)
    assert workers
    start = time.monotonic()
    os.kill(started.pid, signal.SIGINT)
    assert started.wait(60) == 130
    assert time.monotonic() - start < SOON
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    end = time.monotonic() + SOON
    while any(map(is_alive, workers)):
        assert time.monotonic() < end, "worker processes are left"
        time.sleep(0.1)
