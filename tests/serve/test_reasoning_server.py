"""Reasoning, strict functions and schemas through the server."""

import json
from typing import Any

import httpx2
import openai
import pytest

from rjax.serve.api.responses.conversion import input_messages
from rjax.serve.protocol.responses_api_requests import ResponsesRequest

from .live_server import live_server, make_engine
from .reasoning_model import write_reasoning_model

PERSON = {
    "type": "object",
    "properties": {"name": {"enum": ["Ann", "Bo"]}},
    "required": ["name"],
}
PEOPLE = {
    "$defs": {"Person": PERSON},
    "type": "object",
    "properties": {"first": {"$ref": "#/$defs/Person"}, "second": {"$ref": "#/$defs/Person"}},
    "required": ["first", "second"],
}


def tool(name: str, strict: bool = True) -> dict[str, Any]:
    function = {"name": name, "strict": strict, "parameters": PEOPLE}
    return {"type": "function", "function": function}


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = write_reasoning_model(tmp_path_factory.mktemp("reasons") / "tiny", special=False)
    with live_server(make_engine(folder, max_num_seqs=2), reasoning_parser="qwen3") as found:
        yield found


def ask(served, **more: Any) -> tuple[dict[str, Any], dict[str, Any], list[dict[str, Any]]]:
    """A body's choice, the same put together from a stream, and the stream's choices."""
    # Tags become likely, so that a random model thinks and calls.
    ids = served.service.tokenizer.hf.get_vocab()
    bias = {str(ids["</think>"]): 5.5, str(ids["<tool_call>"]): 8, "2": 7}
    body = {
        "messages": [{"role": "user", "content": "Who?"}],
        "seed": 4,
        "max_tokens": 300,
        "logit_bias": bias,
        **more,
    }
    url = f"{served.url}/v1/chat/completions"
    answer = httpx2.post(url, json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    whole = answer.json()["choices"][0]
    events = httpx2.post(url, json={**body, "stream": True}, timeout=60).text.splitlines()
    choices = [
        json.loads(event.removeprefix("data: "))["choices"][0]
        for event in events
        if event.startswith("data: {")
    ]
    return whole, joined(choices), choices


def joined(choices: list[dict[str, Any]]) -> dict[str, Any]:
    text: dict[str, str] = {"reasoning": "", "reasoning_content": "", "content": ""}
    calls: list[list[str]] = []
    for choice in choices:
        for name in text:
            text[name] += choice["delta"].get(name, "")
        for call in choice["delta"].get("tool_calls", ()):
            if "id" in call:
                assert call["type"] == "function"
                calls.append([call["function"]["name"], ""])
            calls[call["index"]][1] += call["function"]["arguments"]
    return {**text, "calls": calls, "finish_reason": choices[-1]["finish_reason"]}


def same(whole: dict[str, Any], streamed: dict[str, Any]) -> bool:
    message = whole["message"]
    made = [list(call["function"].values()) for call in message["tool_calls"] or ()]
    return streamed == {
        "reasoning": message["reasoning"] or "",
        "reasoning_content": message["reasoning_content"] or "",
        "content": message["content"] or "",
        "calls": made,
        "finish_reason": whole["finish_reason"],
    }


THINK = {"chat_template_kwargs": {"enable_thinking": True}}
NO_THINKING = {"chat_template_kwargs": {"enable_thinking": False}}
SCHEMA = {"structured_outputs": {"json": PEOPLE}}


@pytest.mark.thorough
def test_structured_output_after_the_reasoning(served):
    whole, streamed, _ = ask(served, **THINK, **SCHEMA)
    message = whole["message"]
    assert message["reasoning"]
    assert message["reasoning"] == message["reasoning_content"]
    assert "think>" not in message["reasoning"]
    assert set(json.loads(message["content"])) == {"first", "second"}
    assert whole["finish_reason"] == "stop"
    assert same(whole, streamed)


def test_no_thinking_is_no_reasoning(served):
    whole, streamed, _ = ask(served, **NO_THINKING, **SCHEMA)
    assert whole["message"]["reasoning"] is None
    assert set(json.loads(whole["message"]["content"])) == {"first", "second"}
    assert same(whole, streamed)


def test_reasoning_that_is_cut_off(served):
    whole, streamed, choices = ask(
        served, **THINK, max_tokens=8, logit_bias=None, return_token_ids=True
    )
    assert whole["message"]["content"] is None
    assert whole["message"]["reasoning"]
    assert whole["finish_reason"] == "length"
    assert same(whole, streamed)
    told = [token for choice in choices for token in choice.get("token_ids", ())]
    assert told == whole["token_ids"]  # each once


@pytest.mark.sample(1, 1)
@pytest.mark.parametrize(
    ("thinking", "choice"),
    [
        (THINK, {"tool_choice": "auto"}),
        (THINK, {"tool_choice": "required", "parallel_tool_calls": False}),
        (NO_THINKING, {"parallel_tool_calls": False}),
    ],
)
def test_calls_after_the_reasoning(served, thinking, choice):
    tools = [tool("find"), tool("count")]
    for seed in range(20):  # a random model calls a tool in some of its answers
        whole, streamed, choices = ask(served, **thinking, tools=tools, seed=seed, **choice)
        assert same(whole, streamed)
        assert bool(whole["message"]["reasoning"]) == (thinking is THINK)
        if calls := whole["message"]["tool_calls"]:
            break
    else:
        raise AssertionError("no answer has a call")
    assert whole["finish_reason"] == "tool_calls"
    for call in calls:
        assert call["function"]["name"] in ("find", "count")
        people = json.loads(call["function"]["arguments"])
        assert {person["name"] for person in people.values()} <= {"Ann", "Bo"}
    if choice.get("parallel_tool_calls") is False:
        assert len(calls) == 1
    first, *rest = [made for c in choices for made in c["delta"].get("tool_calls", ())]
    assert first["id"] and first["function"]["arguments"] == ""
    assert len(rest) > 3


def test_what_is_refused(served):
    for more in (
        {"tools": [tool("find")]},
        {"tools": [tool("find")], "tool_choice": "required"},
    ):
        body = {"messages": [{"role": "user", "content": "a"}], **SCHEMA, **more}
        answer = httpx2.post(f"{served.url}/v1/chat/completions", json=body, timeout=60)
        assert answer.status_code == 400
        assert "structured output excludes" in answer.text


def test_reasoning_that_a_client_sends_back(served):
    def laid_out(role: str, **more: Any) -> Any:
        messages = [{"role": "user", "content": "a"}, {"role": role, "content": "b", **more}]
        url = f"{served.url}/tokenize"
        return httpx2.post(url, json={"messages": messages}, timeout=60).json()

    plain = laid_out("assistant", reasoning=None, reasoning_content=None)["count"]
    shown = laid_out("assistant", reasoning="hm")["tokens"]
    assert len(shown) > plain
    assert laid_out("assistant", reasoning_content="hm")["tokens"] == shown
    assert laid_out("assistant", reasoning="hm", reasoning_content="hm")["tokens"] == shown
    refused = laid_out("assistant", reasoning="hm", reasoning_content="so")
    assert "differ" in refused["error"]["message"]
    assert "user message has reasoning" in laid_out("user", reasoning="hm")["error"]["message"]


@pytest.mark.thorough
def test_reasoning_of_responses(served):
    ids = served.service.tokenizer.hf.get_vocab()
    args: dict[str, Any] = {
        "model": "tiny",
        "max_output_tokens": 300,
        "extra_body": {
            "seed": 4,
            "logit_bias": {str(ids["</think>"]): 5.5, "2": 7},
            "structured_outputs": {"json": PEOPLE},
            **THINK,
        },
    }
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        found = client.responses.create(input="Who?", **args)
        bias = args["extra_body"]["logit_bias"]
        chat, _, _ = ask(served, **THINK, **SCHEMA, logit_bias=bias, return_token_ids=True)
        reasoning, message = found.output
        assert reasoning.type == "reasoning" and reasoning.content is not None
        assert [part.text for part in reasoning.content] == [chat["message"]["reasoning"]]
        assert message.type == "message" and found.output_text == chat["message"]["content"]
        events = list(client.responses.create(input="Who?", stream=True, **args))
        told = [e.delta for e in events if e.type == "response.reasoning_text.delta"]
        assert "".join(told) == chat["message"]["reasoning"]
        last = events[-1]
        assert last.type == "response.completed"
        assert [item.type for item in last.response.output] == ["reasoning", "message"]
        assert last.response.output_text == found.output_text
        thought = chat["token_ids"].index(ids["</think>"])
        assert thought > 0
        for response in (found, last.response):
            assert response.usage is not None
            assert response.usage.output_tokens_details.reasoning_tokens == thought
        # Given back, by the client or from the store, it is shown to the template.
        messages = [
            {"role": "user", "content": "Who?"},
            {**chat["message"], "tool_calls": None},
            {"role": "user", "content": "Why?"},
        ]
        url = f"{served.url}/tokenize"
        count = httpx2.post(url, json={"messages": messages}, timeout=60).json()["count"]
        question: Any = {"role": "user", "content": "Why?"}
        items: Any = [{"role": "user", "content": "Who?"}, *found.output, question]
        for more in (
            {"input": items},
            {"input": [question], "previous_response_id": found.id},
        ):
            again = client.responses.create(model="tiny", max_output_tokens=1, **more)
            assert again.usage is not None and again.usage.input_tokens == count
        asked = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
        shown = client.responses.create(input="Who?", **asked, **args)
        [part] = shown.output[1].content
        assert part.text == found.output_text
        assert part.logprobs
        *text, end = (entry.token for entry in part.logprobs)
        assert ("".join(text), end) == (part.text, "<|end|>")
        assert all(len(entry.top_logprobs) == 2 for entry in part.logprobs)
        events = list(client.responses.create(input="Who?", stream=True, **asked, **args))
        deltas = [e for e in events if e.type == "response.output_text.delta"]
        assert "".join(e.delta for e in deltas) == part.text
        streamed = [entry.logprob for e in deltas for entry in e.logprobs]
        assert streamed == [entry.logprob for entry in part.logprobs]
        last = events[-1].response.output[1].content[0]
        assert [entry.logprob for entry in last.logprobs] == streamed


@pytest.mark.slow
def test_reasoning_tokens_are_counted(served):
    end = served.service.tokenizer.hf.get_vocab()["</think>"]
    url = f"{served.url}/v1/chat/completions"
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": "Who?"}],
        "max_tokens": 300,
        "return_token_ids": True,
        "logit_bias": {str(end): 5.5, "2": 7},
        "n": 2,
        **SCHEMA,
    }

    def post(**more: Any) -> dict[str, Any]:
        return httpx2.post(url, json={**body, **more}, timeout=60).json()

    def told(usage: dict[str, Any]) -> int:
        return usage["completion_tokens_details"]["reasoning_tokens"]

    whole = post(seed=4, **THINK)
    expected = [choice["token_ids"].index(end) for choice in whole["choices"]]
    assert min(expected) > 0 and expected[0] != expected[1]
    assert told(whole["usage"]) == sum(expected) < whole["usage"]["completion_tokens"]
    options = {"include_usage": True, "continuous_usage_stats": True}
    more = {**body, "seed": 4, **THINK, "stream": True, "stream_options": options}
    events = httpx2.post(url, json=more, timeout=60).text.splitlines()
    counts = [
        told(json.loads(event.removeprefix("data: "))["usage"])
        for event in events
        if event.startswith("data: {")
    ]
    assert counts == sorted(counts) and counts[0] < counts[-1] == sum(expected)
    assert told(post(seed=4, **NO_THINKING)["usage"]) == 0
    cut = post(seed=4, **THINK, max_tokens=3, n=1, logit_bias={str(end): -100, "2": -100})
    assert told(cut["usage"]) == 3
    prompt = {"prompt": "Who?", "max_tokens": 3}
    answer = httpx2.post(f"{served.url}/v1/completions", json=prompt, timeout=60).json()
    assert told(answer["usage"]) == 0


def test_reasoning_items_as_input():
    def shown(*given: dict[str, Any]) -> list[dict[str, Any]]:
        body = ResponsesRequest.model_validate({"input": list(given)})
        return [message.model_dump(exclude_none=True) for message in input_messages(body.input)]

    summary = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]}
    full = {**summary, "content": [{"type": "reasoning_text", "text": "so"}]}
    said = {"role": "assistant", "content": "b"}
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
    made = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    assert shown(full, said, call) == [{**said, "reasoning": "so", "tool_calls": [made]}]
    assert shown(summary, call, full, said) == [
        {"role": "assistant", "reasoning": "hm", "tool_calls": [made]},
        {**said, "reasoning": "so"},
    ]
    user = {"role": "user", "content": "a"}
    assert shown(full, user) == [{"role": "assistant", "reasoning": "so"}, user]
    encrypted = {"type": "reasoning", "summary": [], "encrypted_content": "x"}
    assert shown(encrypted, said) == [said]
    assert shown({"type": None, **said}) == [said]
