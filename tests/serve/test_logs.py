"""What a server logs: throughput, refusals, and its start."""

import asyncio
import dataclasses
import io
import json
import logging
import time
from types import SimpleNamespace

import httpx2
import pytest

from rjax.api.async_engine import AsyncLLMEngine
from rjax.engine.stats import EngineStats
from rjax.serve.protocol.errors import ApiError
from rjax.serve.telemetry import refusal_log, repeated_errors
from rjax.serve.telemetry.refusal_log import RefusalLog
from rjax.serve.telemetry.repeated_errors import RepeatedErrors
from rjax.serve.telemetry.throughput_log import log_throughput, throughput_line

from .hostile import until
from .live_server import LiveServer, live_server, make_engine
from .test_hostile_clients import slowed

BODIES = {
    "/v1/completions": {"prompt": "a", "max_tokens": 1},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
    "/v1/responses": {"input": "a", "max_output_tokens": 1},
}
POST = {"type": "http", "method": "POST", "path": "/v1/completions"}


@pytest.fixture
def log(caplog):
    """Messages of the server's log."""
    caplog.set_level(logging.INFO, "rjax.serve")
    return lambda: [r.getMessage() for r in caplog.records if r.name == "rjax.serve"]


def test_throughput_of_an_interval():
    before = EngineStats("xla", "cpu", steps=5, prompt_tokens=100, output_tokens=50)
    assert throughput_line(before, before, 10.0) is None
    now = dataclasses.replace(
        before,
        steps=9,
        prompt_tokens=12_100,
        cached_tokens=9_000,
        output_tokens=1050,
        num_running=12,
        num_waiting=3,
        num_swapped=1,
        kv_bytes_used=30,
        kv_bytes_total=120,
        kv_tokens_read=400,
        kv_tokens_unshared=1600,
    )
    assert throughput_line(before, now, 10.0) == (
        "prompt 1,200.0 tok/s, output 100.0 tok/s, running 12, waiting 4, KV in use 25.0%, "
        "prefix hit rate 75.0%, token reads saved 75.0%"
    )
    stuck = dataclasses.replace(before, num_waiting=1)
    line = throughput_line(stuck, stuck, 10.0)
    assert line is not None
    assert "waiting 1" in line
    assert "prefix hit rate -, token reads saved -" in line


@pytest.mark.thorough
def test_throughput_is_logged_under_load_only(server: LiveServer, log):
    def lines() -> list[str]:
        return [line for line in log() if "tok/s" in line]

    server.wait_idle()
    logging_task = asyncio.run_coroutine_threadsafe(
        log_throughput(server.service.engine, 0.05), server.loop
    )
    try:
        time.sleep(0.5)
        assert lines() == []
        body = {"prompt": "a", "max_tokens": 490, "ignore_eos": True, "stream": True}
        url = server.url + "/v1/completions"
        with slowed(server, 0.02), httpx2.stream("POST", url, json=body, timeout=60) as answer:
            assert answer.status_code == 200
            until(lambda: any("running 1, waiting 0" in line for line in lines()))
    finally:
        logging_task.cancel()
    server.wait_idle()


def test_the_log_of_a_dead_engine_ends(folder):
    async def run() -> None:
        engine = AsyncLLMEngine(make_engine(folder))
        await engine.start()
        logging_task = asyncio.ensure_future(log_throughput(engine, 0.05))
        await asyncio.sleep(0.2)
        await engine.stop()
        await asyncio.wait_for(logging_task, 30)

    asyncio.run(run())


def test_a_refused_request_is_logged_with_the_reason(folder, log):
    body = {"prompt": "secret prompt", "temperature": 9}
    # Other tests may have filled the log of the server that they share.
    with live_server(make_engine(folder)) as server:
        assert httpx2.post(server.url + "/v1/completions", json=body, timeout=60).status_code == 400
        assert httpx2.get(server.url + "/no%0awhere", timeout=60).status_code == 404
        assert httpx2.get(server.url + "/health", timeout=60).status_code == 200
    first, second = log()
    assert first.startswith("400 POST /v1/completions: temperature is 9; give ")
    assert "secret" not in first
    assert second == "404 GET /no\\nwhere: Not Found"


def test_a_wrong_key_is_logged_without_it(folder, log):
    with live_server(make_engine(folder), keys=["first-key-1234"]) as server:
        headers = {"Authorization": "Bearer wrong-key-1234"}
        assert httpx2.get(server.url + "/v1/models", headers=headers, timeout=60).status_code == 401
    assert log() == [
        "401 GET /v1/models: give a valid API key: Authorization: Bearer KEY",
    ]


def test_clients_cannot_fill_the_log(log, monkeypatch):
    now = 100.0
    monkeypatch.setattr(refusal_log, "time", SimpleNamespace(monotonic=lambda: now))
    refused = RefusalLog()
    for status in (499, 500, 503):
        refused(POST, ApiError(status, "not a refusal"))
    for i in range(50):
        refused(POST, ApiError(400, f"no {i}"))
    assert len(log()) == 20
    now += 10.0
    refused({**POST, "path": "/" + "p" * 500}, ApiError(400, "m" * 500 + "\n\x1b[2J\u202e"))
    last = log()[-1]
    assert last.endswith("(30 refusals before it are not logged)")
    assert len(last) < 400
    refused(POST, ApiError(400, "a\n\x1b[2J\u202e\ud800é"))
    assert log()[-1] == "400 POST /v1/completions: a\\n\\x1b[2J\\u202e\\ud800é"


def test_a_traceback_is_logged_once_a_minute(monkeypatch):
    now, stream = 100.0, io.StringIO()
    monkeypatch.setattr(repeated_errors, "time", SimpleNamespace(monotonic=lambda: now))
    handler = logging.StreamHandler(stream)
    repeated = RepeatedErrors()
    handler.addFilter(repeated)
    logger = logging.Logger("errors")
    logger.addHandler(handler)

    def fail(error: Exception) -> list[str]:
        begin = len(stream.getvalue())
        try:
            raise error
        except Exception:
            logger.exception("request %s failed", "a b")
        return stream.getvalue()[begin:].splitlines()

    assert "Traceback" in fail(ValueError("bad\nmask"))[1]
    assert fail(ValueError("worse\n" + "x" * 500)) == [
        f"request a b failed: ValueError: worse\\n{'x' * 194}..."
    ]
    assert len(fail(KeyError("another kind"))) > 3
    for _ in range(50):
        fail(ValueError("again"))
    assert len(stream.getvalue()) < 4000
    assert fail(ValueError("again")) == []
    now += 60.0
    [first, second, *_] = fail(ValueError("later"))
    assert first == "request a b failed (33 such errors before it are not logged)"
    assert "Traceback" in second
    for kind in range(1000):
        fail(type(f"Error{kind}", (Exception,), {})())
    assert len(repeated._kinds) == 100


@pytest.mark.thorough
def test_a_model_has_several_names(folder):
    names = {"model": "first", "aliases": ("second",), "folder": "/data/third"}
    with live_server(make_engine(folder), **names) as server:
        url = server.url + "/v1"
        assert [m["id"] for m in httpx2.get(url + "/models", timeout=60).json()["data"]] == [
            "first",
            "second",
        ]
        assert httpx2.get(url + "/models/second", timeout=60).json()["id"] == "second"
        for name in ("first", "second", "/data/third"):
            body = {"model": name, "prompt": "a", "max_tokens": 1}
            assert (
                httpx2.post(url + "/completions", json=body, timeout=60).json()["model"] == "first"
            )
        assert httpx2.get(url + "/models/third", timeout=60).status_code == 404


@pytest.mark.parametrize("path", BODIES)
def test_users_are_any_texts_in_one_line(server: LiveServer, path, caplog):
    caplog.set_level(logging.INFO, "rjax.serve.requests")
    shown = {
        "ann": "'ann'",
        "björn": "'björn'",
        "张三": "'张三'",
        "": "-",
        "a\nb\x1b[31m\u202e": r"'a\nb\x1b[31m\u202e'",
        "x" * 2000: f"'{'x' * 64}...'",
    }
    for user in shown:
        body = json.dumps(
            {**BODIES[path], "user": user, "safety_identifier": user, "stream": False}
        )
        answer = httpx2.post(
            server.url + path,
            content=body,
            headers={"Content-Type": "application/json"},
            timeout=60,
        )
        assert answer.status_code == 200, answer.text
        if path == "/v1/responses":
            assert answer.json()["user"] == answer.json()["safety_identifier"] == user
    lines = [r.getMessage() for r in caplog.records if r.name == "rjax.serve.requests"]
    assert [line.partition("user ")[2] for line in lines] == list(shown.values())
