"""Responses in the background, driven by the official client: polled, streamed, cancelled."""

import itertools
import threading
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types.responses import Response

from rjax.serve.config.limits import ServeLimits

from .hostile import until
from .live_server import LiveServer, live_server, make_engine

KEYS = ["first-key-1234", "second-key-5678"]
BODY: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_output_tokens": 9}
LONG = {**BODY, "max_output_tokens": 480, "extra_body": {"ignore_eos": True}}
LIMITS = ServeLimits(responses=3, responses_bytes=300_000)


@pytest.fixture(scope="module")
def served(folder) -> Iterator[LiveServer]:
    with live_server(make_engine(folder), keys=KEYS, limits=LIMITS) as found:
        yield found


@pytest.fixture
def client(served: LiveServer) -> Iterator[openai.OpenAI]:
    with connect(served, KEYS[0]) as found:
        yield found
    served.wait_idle()
    assert served.used_bytes() == 0


@pytest.fixture
def gate(served: LiveServer) -> Iterator[threading.Event]:
    """While it is clear, the engine computes no step."""
    opened = threading.Event()
    opened.set()
    engine = served.service.engine.engine
    step = engine.step

    def gated() -> Any:
        time.sleep(0.005)
        return step() if opened.is_set() else []

    engine.step = gated
    yield opened
    opened.set()
    del engine.step


def connect(server: LiveServer, key: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=60)


def polled(client: openai.OpenAI, name: str) -> Response:
    end = time.monotonic() + 60
    while True:
        found = client.responses.retrieve(name)
        if found.status not in ("queued", "in_progress"):
            return found
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_response_is_polled(client, gate):
    expected = client.responses.create(input="Who lives in Peru?", **BODY)
    gate.clear()
    made = client.responses.create(input="Who lives in Peru?", background=True, **BODY)
    assert (made.status, made.background, made.output) == ("queued", True, [])
    found = client.responses.retrieve(made.id)
    assert (found.status, found.output, found.usage) == ("in_progress", [], None)
    assert client.responses.input_items.list(made.id).data[0].content[0].text.startswith("Who")
    with pytest.raises(openai.BadRequestError, match="has not ended with an answer"):
        client.responses.create(input="a", previous_response_id=made.id, **BODY)
    gate.set()
    found = polled(client, made.id)
    assert (found.status, found.background) == ("incomplete", True)
    assert found.output_text == expected.output_text
    assert found.usage.output_tokens == 9
    assert found.completed_at is not None
    # It has ended: cancelling changes nothing, and a conversation can go on from it.
    assert client.responses.cancel(made.id) == found
    more = client.responses.create(input="a", previous_response_id=made.id, **BODY)
    assert more.usage.input_tokens > found.usage.total_tokens


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_is_cancelled(client, served, gate, stream):
    if stream:
        with client.responses.create(input="a", background=True, stream=True, **LONG) as events:
            name = next(event for event in events).response.id
            assert any(event.type == "response.output_text.delta" for event in events)
            gate.clear()
    else:
        name = client.responses.create(input="a", background=True, **LONG).id
        gate.clear()
    assert served.service.num_live == 1
    found = client.responses.cancel(name)
    assert (found.id, found.status) == (name, "cancelled")
    gate.set()
    served.wait_idle()
    assert client.responses.retrieve(name) == found == client.responses.cancel(name)
    assert bool(found.output) == stream
    if stream:
        assert 0 < len(found.output_text) < 480
        seen = list(client.responses.retrieve(name, stream=True))  # its readers end
        assert "".join(e.delta for e in seen if e.type == "response.output_text.delta")
    with pytest.raises(openai.BadRequestError, match="has not ended with an answer"):
        client.responses.create(input="a", previous_response_id=name, **BODY)


def kinds(events: list[Any]) -> list[str]:
    """Types of events in order; how many tokens one delta has depends on the reader."""
    return [kind for kind, _ in itertools.groupby(event.type for event in events)]


def test_a_stream_goes_on_without_its_client(client, served, gate):
    args = {"input": "Who lives in Peru?", "background": True, "stream": True, **BODY}
    whole = list(client.responses.create(**args))
    assert [event.sequence_number for event in whole] == list(range(len(whole)))
    with client.responses.create(**args) as events:
        first = [next(events) for _ in range(4)]
        gate.clear()
    name = first[0].response.id
    shown: list[Any] = []
    reader = threading.Thread(
        target=lambda: shown.extend(client.responses.retrieve(name, stream=True, starting_after=3))
    )
    reader.start()
    gate.set()
    reader.join(60)
    # Another reader, after the end.
    again = list(client.responses.retrieve(name, stream=True, starting_after=3))
    for rest in (shown, again):
        events = [*first, *rest]
        assert [e.sequence_number for e in events] == list(range(len(events)))
        assert kinds(events) == kinds(whole)
    assert shown[-1].response == client.responses.retrieve(name)
    assert shown[-1].response.output_text == whole[-1].response.output_text
    end = len(first) + len(again)
    assert list(client.responses.retrieve(name, stream=True, starting_after=end)) == []
    with pytest.raises(openai.BadRequestError, match="give the sequence number"):
        client.responses.retrieve(name, extra_query={"stream": "true", "starting_after": "-1"})
    with pytest.raises(openai.BadRequestError, match="and stream true"):
        client.responses.retrieve(name, extra_query={"starting_after": "1"})


def test_an_evicted_or_deleted_response_is_aborted(client, served, gate):
    gate.clear()
    names = [client.responses.create(input="a", background=True, **LONG).id for _ in range(3)]
    assert served.service.num_live == 3
    newest = client.responses.create(input="a", background=True, **LONG).id
    until(lambda: served.service.num_live == 3, 10)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(names[0])
    client.responses.delete(names[1])
    until(lambda: served.service.num_live == 2, 10)
    gate.set()
    for name in (names[2], newest):
        client.responses.cancel(name)
    served.wait_idle()
    for name in names[:2]:
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(name)


@pytest.mark.thorough
def test_events_are_bounded_per_key(client, served):
    """A stream whose events do not fit ends, and the other key's response stays."""
    args = {"input": "a", "background": True, **LONG}
    args["extra_body"] = {**args["extra_body"], "top_logprobs": 9}
    args["include"] = ["message.output_text.logprobs"]
    with connect(served, KEYS[1]) as other:
        kept = other.responses.create(input="a", **BODY).id
        events = list(client.responses.create(stream=True, **args))
        name = events[0].response.id
        assert events[-1].type == "response.output_text.delta"
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(name)
        # One that is larger than all that a key may store fails.
        found = polled(client, client.responses.create(**args).id)
        assert (found.status, found.error.code) == ("failed", "server_error")
        assert "larger than the server stores" in found.error.message
        assert found.output == []
        assert other.responses.retrieve(kept).id == kept


def test_tenants_and_other_responses(client, served, gate):
    gate.clear()
    made = client.responses.create(input="a", background=True, **LONG)
    with connect(served, KEYS[1]) as other:
        for call in (other.responses.retrieve, other.responses.cancel, other.responses.delete):
            with pytest.raises(openai.NotFoundError):
                call(made.id)
    assert client.responses.retrieve(made.id).status == "in_progress"
    gate.set()
    assert client.responses.cancel(made.id).status == "cancelled"
    plain = client.responses.create(input="a", **BODY)
    with pytest.raises(openai.BadRequestError, match="Cannot cancel a synchronous response"):
        client.responses.cancel(plain.id)


def test_a_response_that_fails_says_so(client, monkeypatch):
    from rjax.structured.mask_budget import MaskBudget

    monkeypatch.setattr(MaskBudget, "spend", lambda self, seconds: False)
    wanted: Any = {"type": "json_schema", "name": "x", "schema": {"type": "object"}}
    args = {"input": "a", "background": True, "text": {"format": wanted}, **BODY}
    for stream in (False, True):
        if stream:
            name = list(client.responses.create(stream=True, **args))[-1].response.id
        else:
            name = client.responses.create(**args).id
        found = polled(client, name)
        assert (found.status, found.error.code) == ("failed", "invalid_prompt")
        assert "too long at each token" in found.error.message


def test_the_server_stops_with_responses_in_the_background(folder):
    with live_server(make_engine(folder)) as server, connect(server, "none") as client:
        for stream in (False, True):
            client.responses.create(input="a", background=True, stream=stream, **LONG)
        tasks = list(server.service.background)
        assert len(tasks) == 2
    assert all(task.done() for task in tasks)
