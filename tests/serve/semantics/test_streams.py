"""Streams: the form of events, usage in them, and their end."""

import json

import pytest

ROUTES = {
    "/v1/completions": {"prompt": "Who lives in Peru?"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Who lives in Peru?"}]},
}


@pytest.fixture(params=list(ROUTES))
def stream(http, request):
    """Chunks of a streamed answer, without its last event, which is checked here."""

    def send(**given):
        body = {"model": "tiny", "temperature": 0, "max_tokens": 5, "stream": True}
        lines = []
        with http.stream("POST", request.param, json=body | ROUTES[request.param] | given) as got:
            assert got.status_code == 200
            assert got.headers["content-type"].startswith("text/event-stream")
            lines = [line for line in got.iter_lines() if line]
        assert all(line.startswith("data: ") for line in lines)
        assert lines[-1] == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]

    return send


def test_no_usage_unless_asked(stream):
    assert all(not chunk.get("usage") for chunk in stream())
    for options in (
        {"include_usage": False},
        {"include_usage": False, "continuous_usage_stats": True},
        {"continuous_usage_stats": True},
    ):
        assert all(not chunk.get("usage") for chunk in stream(stream_options=options))


def test_usage_comes_last_without_choices(stream):
    *others, last = stream(stream_options={"include_usage": True})
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 5
    assert last["usage"]["total_tokens"] == last["usage"]["prompt_tokens"] + 5
    assert all(chunk.get("usage") is None and chunk["choices"] for chunk in others)


def test_continuous_usage_grows_to_the_whole(stream):
    chunks = stream(stream_options={"include_usage": True, "continuous_usage_stats": True})
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 5
    for chunk, count in zip(chunks, counts, strict=True):  # the role comes before the first token
        role = any("role" in choice.get("delta", {}) for choice in chunk["choices"])
        assert role == (count == 0)
    for chunk in chunks:
        usage = chunk["usage"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


def test_one_finish_reason_for_each_choice(stream):
    chunks = stream(n=2, temperature=1, seed=1)
    ends = [c["index"] for k in chunks for c in k["choices"] if c.get("finish_reason")]
    assert sorted(ends) == [0, 1]
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert len({chunk["created"] for chunk in chunks}) == 1


def test_a_choice_says_null_until_it_ends(stream):
    choices = [choice for chunk in stream() for choice in chunk["choices"]]
    assert [choice["finish_reason"] for choice in choices[:-1]] == [None] * (len(choices) - 1)
    assert choices[-1]["finish_reason"] == "length"
    assert all(choice["logprobs"] is None for choice in choices)


def test_a_chat_delta_holds_only_news(http):
    age = {"type": "object", "properties": {"age": {"type": "integer", "maximum": 99}},
           "required": ["age"]}  # fmt: skip
    tool = {"type": "function", "function": {"name": "ask", "parameters": age}}
    body = ROUTES["/v1/chat/completions"] | {"tools": [tool], "tool_choice": "required"}
    body["parallel_tool_calls"] = False
    body |= {"model": "tiny", "temperature": 0, "max_tokens": 80, "stream": True}
    with http.stream("POST", "/v1/chat/completions", json=body) as got:
        events = [line.removeprefix("data: ") for line in got.iter_lines() if line]
    deltas = [json.loads(event)["choices"][0]["delta"] for event in events[:-1]]
    calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert all(delta.keys() == {"tool_calls"} for delta in deltas[1:-1]), deltas
    assert deltas[-1] == {}
    assert calls[0].keys() == {"index", "id", "type", "function"}
    assert calls[0]["function"]["name"] == "ask"
    assert len(calls) > 1
    for call in calls[1:]:
        assert call.keys() == {"index", "function"}
        assert call["function"].keys() == {"arguments"}


@pytest.mark.parametrize("route", list(ROUTES))
@pytest.mark.parametrize("given", [{"stream_options": {"include_usage": True}}])
def test_stream_options_need_a_stream(refused, route, given):
    assert "stream" in refused(route, **ROUTES[route], **given)


@pytest.mark.parametrize("route", list(ROUTES))
def test_a_refusal_of_a_stream_is_a_400_and_no_event(refused, route):
    assert "temperature" in refused(route, **ROUTES[route] | {"stream": True, "temperature": 9})


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a%sb", "echo": True}),
        ("/v1/responses", {"input": "Who?", "instructions": "a%sb"}),
    ],
)
def test_a_line_of_an_event_is_one_for_every_client(http, path, body):
    """Python, for one, also ends lines at these characters, which JSON allows in a string."""
    ends = "\u0085\u2028\u2029"
    text = json.loads(json.dumps(body).replace("%s", ends))
    given = {"model": "tiny", "stream": True, "temperature": 0}
    given |= {"max_output_tokens": 4} if "input" in body else {"max_tokens": 4}
    with http.stream("POST", path, json=given | text) as answer:
        whole = answer.read().decode()
    lines = whole.splitlines()
    assert all(line.startswith(("data: ", "event: ")) for line in lines if line)
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert ends in json.dumps(events, ensure_ascii=False)
