"""The wall clock jumps by days while requests run: none ends early, late or not at all."""

import time

import httpx2
import pytest

from .hostile import SHORT, ask, until
from .live_server import LiveServer

DAY = 86400.0
LONG = {**SHORT, "max_tokens": 100, "ignore_eos": True, "stream": True}


@pytest.mark.sample(0, 1)
@pytest.mark.parametrize("days", [400.0, -400.0])
def test_requests_are_as_long_as_without(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch, days: float
):
    alone = ask(server, "POST", "/v1/completions", SHORT).json["choices"]
    clock, offset = time.time, [0.0]
    monkeypatch.setattr(time, "time", lambda: clock() + offset[0])
    url = server.url + "/v1/completions"
    with httpx2.Client(timeout=60) as link, link.stream("POST", url, json=LONG) as stream:
        events = stream.iter_lines()
        assert next(events).startswith("data: {")
        offset[0] = days * DAY
        assert [line for line in events if line][-1] == "data: [DONE]"
        # The connection that was kept alive, a time limit, and a request of its own.
        kept = link.post(url, json={**SHORT, "timeout": 60})
        assert kept.json()["choices"] == alone
    found = ask(server, "POST", "/v1/completions", SHORT)
    assert found.json["choices"] == alone
    assert abs(found.json["created"] - clock() - days * DAY) < 60
    assert ask(server, "GET", "/health").json["status"] == "ready"
    until(lambda: not server.service.engine.num_live)
