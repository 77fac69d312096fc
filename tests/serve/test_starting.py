"""The port is open before the model is loaded: early requests, progress, failures and signals."""

import contextlib
import http.client
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families

from rjax.batch.compile_progress import CompileProgress
from rjax.commands.serve.command import main
from rjax.engine.llm_engine import LLMEngine
from rjax.errors import InvalidConfigError, OutOfMemoryError
from rjax.serve.loading import served_engine

from .hostile import until
from .live_server import OPTIONS, make_engine
from .starting_server import BEARER, KEY, PAGE, SHORT, SOON, starting

SIZES = ("page_size", "num_pages", "max_num_seqs", "max_num_batched_tokens")


@pytest.fixture(scope="module")
def engine(folder) -> LLMEngine:
    return make_engine(folder)


def test_an_early_request_waits_and_is_answered(engine):
    with starting(engine) as server:
        early = server.begin()
        large = server.begin({"prompt": "a" * 300_000})
        for path in ("/health", "/ping", "/llm/health"):
            health = httpx2.get(server.url + path, timeout=60)
            assert health.status_code == 503
            assert health.json() == {"status": "starting", "compiled": 3, "of": 20}
            assert health.headers["retry-after"] == "2"
        for path in ("/v1/models", "/llm/v1/models"):
            [card] = httpx2.get(server.url + path, headers=BEARER, timeout=60).json()["data"]
            assert (card["id"], card["max_model_len"]) == ("tiny", None)
        for path in ("/metrics", "/llm/metrics"):
            figures = httpx2.get(server.url + path, headers=BEARER, timeout=60)
            assert figures.status_code == 200
            assert not list(text_string_to_metric_families(figures.text))
        assert not early.done()
        server.load()
        assert early.result().json()["choices"] == server.post().json()["choices"]
        assert large.result().json() == server.post(prompt="a" * 300_000).json()
        assert httpx2.get(server.url + "/health", timeout=60).json() == {"status": "ready"}
        [card] = httpx2.get(server.url + "/v1/models", headers=BEARER, timeout=60).json()["data"]
        assert card["max_model_len"] == 512


def test_early_requests_can_be_refused(engine):
    with starting(engine, "refuse") as server:
        refused = httpx2.post(
            server.url + "/v1/completions",
            json=SHORT,
            headers=BEARER | {"Origin": PAGE},
            timeout=60,
        )
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "starting"
        assert refused.headers["retry-after"] == "2"
        assert refused.headers["access-control-allow-origin"] == PAGE
        server.load()
        assert server.post().status_code == 200


@pytest.mark.parametrize("early_requests", ["wait", "refuse"])
def test_a_wrong_key_learns_nothing_early(engine, early_requests):
    with starting(engine, early_requests) as server:
        routes = [("GET", "/v1/models"), ("POST", "/v1/completions"), ("GET", "/nowhere")]

        def answers() -> list[tuple[int, Any]]:
            found = [
                httpx2.request(method, server.url + path, headers=headers, timeout=SOON)
                for method, path in routes
                for headers in ({}, {"Authorization": "Bearer another-key"})
            ]
            return [(answer.status_code, answer.json()) for answer in found]

        early = answers()
        assert {status for status, _ in early} == {401}
        server.load()
        assert answers() == early


def test_a_client_that_leaves_waits_no_longer(engine):
    with starting(engine) as server:
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as left:
            head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
            left.sendall(f"{head}Content-Length: 9\r\n\r\n{{".encode())
            until(lambda: server.app._waiting == 1, SOON)
        until(lambda: server.app._waiting == 0, SOON)


def test_the_number_of_waiting_requests_is_limited(engine):
    with starting(engine, connections=1) as server:
        first = server.begin()
        assert server.post().status_code == 503
        server.load()
        assert first.result().status_code == 200


def test_health_says_what_is_still_compiling(engine, monkeypatch):
    with starting(engine) as server:
        server.load()
        progress = CompileProgress(12, 20)
        monkeypatch.setattr(engine, "compile_progress", lambda: progress)
        health = httpx2.get(server.url + "/health", timeout=60)
        assert health.status_code == 200
        assert health.json() == {"status": "ready", "compiled": 12, "of": 20}


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("error", "said"),
    [
        (InvalidConfigError("the model has no tokenizer"), "the model has no tokenizer"),
        (OutOfMemoryError("the weights do not fit"), "the weights do not fit"),
    ],
)
def test_a_failure_while_starting_is_one_line(error, said, monkeypatch, caplog, capsys):
    """As before the port was open; requests that wait get a 503."""
    caplog.set_level(logging.INFO, "rjax.serve")
    begun = threading.Event()

    def fail(config: Any) -> None:
        assert begun.wait(60)
        raise error

    monkeypatch.setattr(served_engine, "build_engine", fail)
    with ThreadPoolExecutor() as threads:
        status = threads.submit(main, ["--port", "0", "--disable-frontend-multiprocessing"])
        until(lambda: "listening on" in caplog.text, SOON)
        url = caplog.text.split("listening on ")[1].split(",")[0]
        assert httpx2.get(url + "/health", timeout=60).json() == {"status": "starting"}
        with waiting(url) as link:
            begun.set()
            start = time.monotonic()
            assert status.result() == 2
            assert time.monotonic() - start < SOON
            assert answer_of(link) == 503
    lines = [x for x in capsys.readouterr().err.splitlines() if x.startswith("rjax serve: error: ")]
    assert lines == [f"rjax serve: error: {said}"]


@contextlib.contextmanager
def waiting(url: str) -> Iterator[socket.socket]:
    """The connection of a request that waits in the server: it has asked for the body."""
    host, port = url.removeprefix("http://").split(":")
    content = json.dumps(SHORT).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        f"Expect: 100-continue\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    with socket.create_connection((host, int(port)), timeout=60) as link:
        link.sendall(head.encode())
        assert link.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        link.sendall(content)
        yield link


def answer_of(link: socket.socket) -> int:
    """The status of the answer."""
    found = http.client.HTTPResponse(link)
    found.begin()
    return found.status


@contextlib.contextmanager
def process(folder, cache: str) -> Iterator[tuple[subprocess.Popen, str]]:
    """The command, and its URL as soon as the port is open."""
    command = [
        *(sys.executable, "-m", "rjax.serve", "--model", str(folder), "--load-format", "dummy"),
        *("--port", "0", "--drain-seconds", "1", "--warmup", "off"),
        *(f"--{name.replace('_', '-')}={OPTIONS[name]}" for name in SIZES),
    ]
    environment = {**os.environ, "JAX_COMPILATION_CACHE_DIR": cache}
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # children inherit SIG_IGN
    started = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    signal.signal(signal.SIGINT, before)
    try:
        assert started.stderr is not None
        line = next(line for line in started.stderr if "listening on" in line)
        yield started, line.split("listening on ")[1].split(",")[0]
    finally:
        started.kill()
        started.communicate()


@pytest.mark.slow
def test_a_request_in_the_first_second_is_answered(folder, request):
    with process(folder, str(request.config.cache.mkdir("jax"))) as (started, url):
        assert httpx2.get(url + "/health", timeout=SOON).json() == {"status": "starting"}
        evil = {"Host": "evil.example"}  # whose address is that of this machine
        assert httpx2.get(url + "/v1/models", headers=evil, timeout=SOON).status_code == 403
        answer = httpx2.post(url + "/v1/completions", json=SHORT, timeout=300)
        assert answer.status_code == 200
        assert answer.json()["usage"]["completion_tokens"] == 5
        assert started.stdout is not None
        assert started.stdout.readline() == f"tiny on {url}/v1\n"
        started.terminate()
        assert started.wait(60) == 0


@pytest.mark.sample(1, 1)
@pytest.mark.parametrize(
    ("sent", "status", "said"),
    [(signal.SIGTERM, -signal.SIGTERM, ""), (signal.SIGINT, 130, "rjax serve: interrupted\n")],
)
@pytest.mark.parametrize("seconds", [0.5, 1.5])
def test_a_signal_while_starting_ends_it_soon(folder, tmp_path, sent, status, said, seconds):
    with process(folder, str(tmp_path)) as (started, url), waiting(url) as link:
        time.sleep(seconds)
        start = time.monotonic()
        started.send_signal(sent)
        _, errors = started.communicate(timeout=120)
        assert time.monotonic() - start < SOON
        assert started.returncode == status
        assert errors.endswith(said)
        assert "Traceback" not in errors
        assert answer_of(link) == 503
