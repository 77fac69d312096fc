"""Grammars whose masks take all states, much memory or long: they harm no request but their own.

| attack | answer | bounds |
| --- | --- | --- |
| a regex that needs more states than its lexer may have | 400 | others' answers to the same regex |
| distinct grammars, each with a cheap first mask and large later ones | 200 or 400 | 150 MB stay |
| one that outgrows the memory of all grammars | 400 | |
| one slow mask | 400 | |
| slow masks of request after request | 400, then 503 | other keys, and what was quick |
"""

import gc

import httpx2
import pytest

from rjax.serve.config.limits import ServeLimits
from rjax.structured import compiled_grammar

from .live_server import LiveServer, live_server, make_engine
from .watch import resident

KEYS = ["a" * 20, "b" * 20]
EXHAUSTING = "(.*a.{18}b|.*c.{18}d)z"
"""A regex of 2**18 states; a few tokens need few of them."""


@pytest.fixture(scope="module")
def keyed(folder):
    """A server of two keys, whose masks may take long."""
    limits = ServeLimits(key_mask_seconds=1e6)
    with live_server(make_engine(folder), limits=limits, keys=KEYS) as found:
        yield found


def post(server: LiveServer, key: str, **more) -> httpx2.Response:
    body = {"prompt": "a", "max_tokens": 4, "temperature": 1, "seed": 3, **more}
    headers = {"Authorization": f"Bearer {key}"}
    url = server.url + "/v1/completions"
    return httpx2.post(url, json=body, headers=headers, timeout=120)


def growing(number: int, terminals: int = 400) -> dict:
    """A grammar of overlapping terminals: after "x" each token adds thousands of states."""
    names = [f"T{i}" for i in range(terminals)]
    rules = [
        f"{name}: /[a-z]*{chr(97 + i % 26)}[a-z0-9]{{{5 + i % 9}}}{chr(97 + i * 7 % 26)}/"
        for i, name in enumerate(names)
    ]
    start = f'start: "x{number}" w*\nw: {" | ".join(names)}\n'
    return {"structured_outputs": {"grammar": start + "\n".join(rules)}}


@pytest.mark.thorough
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


def test_grammars_are_shared_within_a_key_until_their_masks_are_slow(
    keyed: LiveServer, monkeypatch
):
    store = keyed.service.engine.engine._masks._compiler()._store
    for quick, source in ((1.0, "[ab]{3}1"), (-0.05, "[ab]{3}2")):
        monkeypatch.setattr(compiled_grammar, "_QUICK", quick)  # then slow
        found = []
        for key in [*KEYS, *KEYS]:
            assert post(keyed, key, structured_outputs={"regex": source}).status_code == 200
            found += [g for (_, one), (g, _) in store._kept.items() if one.source == source]
        owners = [owner for owner, one in store._kept if one.source == source]
        if quick > 0:
            assert sorted(owners) == sorted(t.name for t in keyed.service.keys.tenants)
            assert len(set(map(id, found))) == 2
        else:
            assert owners == []


@pytest.mark.thorough
def test_grown_grammars_do_not_stay(keyed: LiveServer):
    assert post(keyed, KEYS[0], **growing(0)).status_code in (200, 400)
    before = resident()
    for i in range(1, 6):
        answer = post(keyed, KEYS[0], **growing(i), max_tokens=10)
        assert answer.status_code in (200, 400), answer.text
    keyed.wait_idle()
    gc.collect()
    assert resident() - before < 150e6


@pytest.mark.thorough
def test_all_grammars_together_have_a_bound(folder):
    limits = ServeLimits(grammar_bytes=16 * 2**20)
    with live_server(make_engine(folder), limits=limits, keys=KEYS) as small:
        failed = post(small, KEYS[0], **growing(0), max_tokens=10)
        assert failed.status_code == 400
        assert "all grammars together may take 16 MiB" in failed.json()["error"]["message"]
        wanted = {"structured_outputs": {"regex": "[ab]{9}"}}
        assert post(small, KEYS[1], **wanted, max_tokens=20).status_code == 200


def test_one_slow_mask_ends_its_request(folder):
    limits = ServeLimits(one_mask_seconds=0.02)
    with live_server(make_engine(folder), limits=limits, keys=KEYS) as small:
        failed = post(small, KEYS[0], **growing(0), max_tokens=10)
        assert failed.status_code == 400
        assert failed.json()["error"]["code"] == "grammar_failed"
        assert "s at one token; 0.02 s are allowed" in failed.json()["error"]["message"]


@pytest.mark.thorough
def test_slow_masks_of_a_key_end(folder):
    limits = ServeLimits(key_mask_seconds=0.5)
    known, new = ({"structured_outputs": {"regex": f"[ab]{{{size}}}"}} for size in (100, 101))
    with live_server(make_engine(folder), limits=limits, keys=KEYS) as small:
        assert post(small, KEYS[0], **known, max_tokens=100).status_code == 200
        failed = post(small, KEYS[0], **growing(0), max_tokens=30)
        assert failed.status_code == 400, failed.text
        assert "more than 0.5 s within a minute" in failed.json()["error"]["message"]
        later = [post(small, KEYS[0], **what) for what in (growing(1), new, known, {})]
        assert [answer.status_code for answer in later] == [503, 503, 200, 200]
        assert int(later[0].headers["retry-after"]) >= 1
        assert post(small, KEYS[1], **new).status_code == 200
