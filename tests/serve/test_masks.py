"""Sequences under a grammar run every step, beside others too, though masks need the last token."""

import json

import httpx2
import pytest

from rjax.sampling import SamplingParams
from rjax.structured.constraint import Constraint
from rjax.structured.mask_request import MaskRequest

from .live_server import make_engine


@pytest.mark.sample(1)
@pytest.mark.parametrize("plain", [0, 2])
def test_steps_of_a_masked_token(folder, plain):
    engine = make_engine(folder)
    wanted = MaskRequest(Constraint("regex", "[ab]{24}"))
    masks = engine.structured_masks(SamplingParams(n=2), wanted)
    for i, mask in enumerate(masks):
        params = SamplingParams(max_tokens=40, seed=3)  # the same tokens, so the same length
        engine.add_request(f"masked {i}", [5, 6, 7], params, masks=[mask])
    for i in range(plain):
        params = SamplingParams(max_tokens=100, ignore_eos=True)
        engine.add_request(f"plain {i}", [5, 6, 7], params)
    ended = []
    while len(ended) < len(masks):
        ended += [o.outputs[0] for o in engine.step() if o.request_id.startswith("masked")]
        ended = [o for o in ended if o.finished()]
    assert set(ended[0].text) <= {"a", "b"}
    assert len(ended[0].text) == 24
    # The end is known when one more step is under way.
    assert engine.stats().steps - len(ended[0].token_ids) in (0, 1)


def doomed(monkeypatch, server, which):
    """Let the grammar of these samples fail after three tokens."""
    engine = server.service.engine.engine
    plain = engine.structured_masks

    def masks(*given):
        found = plain(*given)
        for i in which:
            accept, left = found[i].accept, [3]

            def fail(token, mask=found[i], accept=accept, left=left):
                left[0] -= 1
                if not left[0]:
                    mask._fail("no token fits the grammar")
                accept(token)

            found[i].accept = fail
        return found

    monkeypatch.setattr(engine, "structured_masks", masks)


CHAT = {"messages": [{"role": "user", "content": "a"}]}


@pytest.mark.parametrize("route", ["completions", "chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_dead_end_of_one_sample_harms_no_other(server, monkeypatch, route, stream):
    doomed(monkeypatch, server, [1])
    body = {"n": 3, "temperature": 1, "seed": 3, "structured_outputs": {"regex": "[ab]{24}"}}
    body |= {"max_tokens": 60, "stream": stream, **({"prompt": "a"} if "/" not in route else CHAT)}
    answer = httpx2.post(f"{server.url}/v1/{route}", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    if stream:
        lines = [x for x in answer.text.splitlines() if x.startswith("data: {")]
        events = [json.loads(line.removeprefix("data: ")) for line in lines]
    else:
        events = [answer.json()]
    texts, reasons = [""] * 3, {}
    for choice in (choice for event in events for choice in event["choices"]):
        part = choice.get("delta") or choice.get("message") or {"content": choice.get("text")}
        texts[choice["index"]] += part.get("content") or ""
        if choice["finish_reason"] is not None:
            assert choice["index"] not in reasons
            reasons[choice["index"]] = choice["finish_reason"], choice.get("stop_reason")
    assert reasons[1] == ("error", "no token fits the grammar")
    assert [reasons[0][0], reasons[2][0]] == ["stop", "stop"]
    assert len(texts[0]) == len(texts[2]) == 24
    assert len(texts[1]) < 24


@pytest.mark.parametrize("n", [1, 2])
def test_when_every_sample_fails_the_request_does(server, monkeypatch, n):
    doomed(monkeypatch, server, range(n))
    body = {"prompt": "a", "n": n, "temperature": 1, "structured_outputs": {"regex": "[ab]{24}"}}
    body |= {"max_tokens": 60}
    answer = httpx2.post(f"{server.url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "grammar_failed"
    text = httpx2.post(
        f"{server.url}/v1/completions", json={**body, "stream": True}, timeout=60
    ).text
    assert "grammar_failed" in text
    assert "[DONE]" not in text
