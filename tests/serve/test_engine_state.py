"""Operators pause the engine and put it to sleep over HTTP."""

import concurrent.futures
import json
from collections.abc import Iterator

import httpx2
import pytest

from .live_server import LiveServer, live_server, make_engine

CLIENT, OPERATOR = "a-client-key-123456", "an-operator-key-1234"
ROUTES = {
    "/pause": "POST",
    "/resume": "POST",
    "/is_paused": "GET",
    "/sleep": "POST",
    "/wake_up": "POST",
    "/is_sleeping": "GET",
}


@pytest.fixture(scope="module")
def served(folder) -> Iterator[LiveServer]:
    with live_server(
        make_engine(folder),
        keys=[CLIENT],
        operator_keys=(OPERATOR,),
        enable_weight_updates=True,
    ) as found:
        yield found


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def call(server: LiveServer, path: str, key: str = OPERATOR, **query) -> httpx2.Response:
    method = ROUTES[path]
    return httpx2.request(method, server.url + path, params=query, headers=bearer(key), timeout=60)


def complete(server: LiveServer, tokens: int = 8, **body) -> httpx2.Response:
    body = {"prompt": "Once", "max_tokens": tokens, "seed": 1, "ignore_eos": True} | body
    return httpx2.post(
        server.url + "/v1/completions", json=body, headers=bearer(CLIENT), timeout=120
    )


def text(found: httpx2.Response) -> str:
    assert found.status_code == 200, found.text
    return found.json()["choices"][0]["text"]


def test_only_operators_and_only_if_enabled(served: LiveServer, folder):
    for path, method in ROUTES.items():
        refused = call(served, path, CLIENT)
        assert refused.status_code == 403
        assert refused.json()["error"]["code"] == "operators_only"
        assert httpx2.request(method, served.url + path, timeout=60).status_code == 401
    assert not served.service.engine.engine.is_paused()
    # An operator's key opens the other routes too.
    assert (
        httpx2.get(served.url + "/v1/models", headers=bearer(OPERATOR), timeout=60).status_code
        == 200
    )
    with live_server(make_engine(folder)) as plain:
        for path, method in ROUTES.items():
            assert httpx2.request(method, plain.url + path, timeout=60).status_code == 404


def test_a_stream_is_frozen_and_goes_on(served: LiveServer):
    wanted = text(complete(served, 60))
    body = {"prompt": "Once", "max_tokens": 60, "seed": 1, "ignore_eos": True, "stream": True}
    with (
        concurrent.futures.ThreadPoolExecutor(1) as threads,
        httpx2.stream(
            "POST",
            served.url + "/v1/completions",
            json=body,
            headers=bearer(CLIENT),
            timeout=60,
        ) as stream,
    ):
        lines = stream.iter_lines()
        found = [next(lines)]
        assert call(served, "/pause", mode="keep").json() == {"status": "paused"}
        assert call(served, "/is_paused").json() == {"is_paused": True}
        queued = threads.submit(complete, served)
        with pytest.raises(concurrent.futures.TimeoutError):
            queued.result(0.3)
        assert httpx2.get(served.url + "/health", timeout=60).json()["status"] == "ready"
        assert call(served, "/resume").json() == {"status": "resumed"}
        found += lines
        assert text(queued.result(60))
    events = [json.loads(line[6:]) for line in found if line.startswith("data: {")]
    assert "".join(event["choices"][0]["text"] for event in events) == wanted


def test_sleeping_answers_are_503_until_awake(served: LiveServer):
    wanted = text(complete(served))
    assert call(served, "/sleep", level=2, mode="wait").status_code == 200
    assert call(served, "/is_sleeping").json() == {"is_sleeping": True}
    refused = complete(served)
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "engine_sleeping"
    assert "sleeps" in refused.json()["error"]["message"] and refused.headers["Retry-After"]
    assert call(served, "/resume").status_code == 503
    registered = httpx2.post(
        served.url + "/v1/prefixes",
        json={"name": "p", "prompt": "Once upon a time"},
        headers=bearer(CLIENT),
        timeout=60,
    )
    assert registered.status_code == 503
    assert call(served, "/wake_up", tags="weights").status_code == 200
    assert complete(served).status_code == 503
    assert call(served, "/wake_up", tags="kv_cache").status_code == 200
    assert call(served, "/is_sleeping").json() == {"is_sleeping": False}
    assert text(complete(served)) == wanted


def test_parameters_are_checked(served: LiveServer):
    for path, query in (
        ("/pause", {"mode": "later"}),
        ("/pause", {"clear_cache": "perhaps"}),
        ("/pause", {"modes": "keep"}),
        ("/sleep", {"level": "3"}),
        ("/sleep", {"level": "one"}),
        ("/sleep", {"mode": "later"}),
        ("/wake_up", {"tags": "kv"}),
    ):
        found = call(served, path, **query)
        assert found.status_code == 400, (path, query)
        assert "give" in found.text or "there are" in found.text
    assert call(served, "/is_paused").json() == {"is_paused": False}
    assert call(served, "/pause", wait_for_inflight_requests="true", clear_cache="1").is_success
    call(served, "/resume")
