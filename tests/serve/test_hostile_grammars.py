"""Grammars whose masks exhaust their lexer: they harm the request that brings them, and no other.

| attack | answer | bounds |
| --- | --- | --- |
| a regex that needs more states than the lexer has | 400 | others' answers to the same regex stay |
"""

import httpx2
import pytest

from .live_server import LiveServer, live_server, make_engine

KEYS = ["a" * 20, "b" * 20]
EXHAUSTING = "(.*a.{18}b|.*c.{18}d)z"
"""A regex of 2**18 states; a few tokens need few of them."""


@pytest.fixture(scope="module")
def keyed(folder):
    """A server of two keys."""
    with live_server(make_engine(folder), keys=KEYS) as found:
        yield found


def post(server: LiveServer, key: str, **more) -> httpx2.Response:
    body = {"prompt": "a", "max_tokens": 4, "temperature": 1, "seed": 3, **more}
    headers = {"Authorization": f"Bearer {key}"}
    url = server.url + "/v1/completions"
    return httpx2.post(url, json=body, headers=headers, timeout=120)


def test_an_exhausted_lexer_is_no_other_requests_fault(keyed: LiveServer):
    wanted = {"structured_outputs": {"regex": EXHAUSTING}}
    before = post(keyed, KEYS[1], **wanted)
    assert before.status_code == 200, before.text
    failed = post(keyed, KEYS[0], **wanted, n=8, max_tokens=400)
    assert failed.status_code == 400
    assert failed.json()["error"]["code"] == "grammar_failed"
    for key in (KEYS[1], KEYS[0], KEYS[1]):
        after = post(keyed, key, **wanted)
        assert after.status_code == 200, after.text
        assert after.json()["choices"] == before.json()["choices"]


def test_keys_share_no_lexer(keyed: LiveServer):
    wanted = {"structured_outputs": {"regex": "[ab]{3}"}}
    for key in KEYS:
        assert post(keyed, key, **wanted).status_code == 200
    kept = keyed.service.engine.engine._masks._compiler()._kept
    grammars = [held for (_, made), held in kept.items() if made.source == "[ab]{3}"]
    assert len(grammars) == 2
