"""What OpenAI's and vLLM's clients send beyond the plain request, as a server answers it."""

import json
from typing import Any

import httpx2
import pytest

from rjax.serve.config.limits import ServeLimits

from .live_server import LiveServer, live_server, make_engine

ASK = {"role": "user", "content": "Who lives in Peru?"}
BEGUN = {"role": "assistant", "content": "In Peru lives"}
CHAT: dict[str, Any] = {"messages": [ASK], "max_tokens": 4, "temperature": 0}
COMPLETION: dict[str, Any] = {"prompt": "Who lives in Peru?", "max_tokens": 4, "temperature": 0}
ROUTES = {"/v1/chat/completions": CHAT, "/v1/completions": COMPLETION}
TOOL = {"type": "function", "function": {"name": "find", "description": "finds people"}}


def post(server: LiveServer, path: str, body: dict[str, Any], **more: Any) -> dict[str, Any]:
    found = httpx2.post(server.url + path, json=body | more, timeout=60)
    assert found.status_code == 200, found.text
    return found.json()


def chat(server: LiveServer, **more: Any) -> dict[str, Any]:
    return post(server, "/v1/chat/completions", CHAT, **more)


def complete(server: LiveServer, **more: Any) -> dict[str, Any]:
    return post(server, "/v1/completions", COMPLETION, **more)


def chunks(server: LiveServer, path: str, **more: Any) -> list[dict[str, Any]]:
    body = ROUTES[path] | {"stream": True} | more
    found = httpx2.post(server.url + path, json=body, timeout=60)
    assert found.status_code == 200, found.text
    events = [line.removeprefix("data: ") for line in found.text.split("\n\n") if line]
    assert events[-1] == "[DONE]"
    return [json.loads(event) for event in events[:-1]]


def test_a_second_turn_with_all_of_the_first_answer(server: LiveServer):
    plain = chat(server)["choices"][0]["message"]
    message = plain | {
        "provider_specific_fields": {"a": 1},
        "annotations": [],
        "audio": None,
        "function_call": None,
        "reasoning_content": "\ud7ff",
        "reasoning": None,
        "tool_calls": [],
        "parsed": {"b": 2},
    }
    bare = {"role": "assistant", "content": plain["content"]}
    found, expected = (
        chat(server, messages=[ASK, answer, ASK], return_token_ids=True, max_tokens=4.0)
        for answer in (message, bare)
    )
    assert found["prompt_token_ids"] == expected["prompt_token_ids"]
    assert found["choices"] == expected["choices"]
    refused = {"role": "assistant", "content": None, "refusal": plain["content"]}
    again = chat(server, messages=[ASK, refused, ASK], return_token_ids=True)
    assert again["prompt_token_ids"] == expected["prompt_token_ids"]


def test_tokens_as_token_ids(server: LiveServer):
    more = {"return_tokens_as_token_ids": True, "return_token_ids": True}
    asked = {"logprobs": True, "top_logprobs": 2}
    named, plain = chat(server, **asked, **more)["choices"][0], chat(server, **asked)["choices"][0]
    for new, old in zip(named["logprobs"]["content"], plain["logprobs"]["content"], strict=True):
        assert new["token"] in [top["token"] for top in new["top_logprobs"]]
        assert [top["bytes"] for top in new["top_logprobs"]] == [
            top["bytes"] for top in old["top_logprobs"]
        ]
    tokens = [entry["token"] for entry in named["logprobs"]["content"]]
    assert tokens == [f"token_id:{token}" for token in named["token_ids"]]
    asked = {"logprobs": 2, "echo": True}
    named, plain = (complete(server, **asked, **m)["choices"][0] for m in (more, {}))
    ids = [*named["prompt_token_ids"], *named["token_ids"]]
    assert named["logprobs"]["tokens"] == [f"token_id:{token}" for token in ids]
    assert named["logprobs"]["text_offset"] == plain["logprobs"]["text_offset"]
    assert all(name.startswith("token_id:") for name in named["logprobs"]["top_logprobs"][-1])
    parts = chunks(server, "/v1/completions", **asked, **more)
    offsets = [o for part in parts for o in part["choices"][0]["logprobs"]["text_offset"]]
    assert offsets == named["logprobs"]["text_offset"]


def test_a_chats_echo(server: LiveServer):
    """The first delta is the echo; with logprobs the prompt is scored."""
    more = {"messages": [ASK, BEGUN], "continue_final_message": True, "echo": True}
    echoed = chat(server, **more, n=1, logprobs=True)
    assert len(echoed["prompt_logprobs"]) == echoed["usage"]["prompt_tokens"]
    first, *_ = chunks(server, "/v1/chat/completions", **more)
    assert first["choices"][0]["delta"]["content"] == BEGUN["content"]


def test_the_beginning_token_of_a_completion(server: LiveServer):
    def prompt(**more: Any) -> list[int]:
        found = complete(server, return_token_ids=True, max_tokens=1, **more)
        return found["choices"][0]["prompt_token_ids"]

    plain = prompt()
    assert prompt(add_special_tokens=True) == plain
    assert prompt(add_special_tokens=False) == plain[1:]


@pytest.mark.parametrize(
    "more",
    [
        {"tools": [TOOL]},
        {"messages": [ASK, BEGUN], "continue_final_message": True},
        {"add_generation_prompt": False, "chat_template_kwargs": {"a": None}},
    ],
    ids=["tools", "continue", "kwargs"],
)
def test_tokenize_shows_what_a_chat_reads(server: LiveServer, more):
    read = chat(server, max_tokens=1, return_token_ids=True, **more)["prompt_token_ids"]
    assert read != chat(server, max_tokens=1, return_token_ids=True)["prompt_token_ids"]
    assert post(server, "/tokenize", {"messages": CHAT["messages"]} | more)["tokens"] == read


def test_a_strict_server(folder):
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    with live_server(make_engine(folder, chat_template=template), strict_fields=True) as found:
        unknown = httpx2.post(
            f"{found.url}/v1/completions", json=COMPLETION | {"mood": 1}, timeout=60
        )
        assert unknown.status_code == 400
        assert unknown.json()["error"]["code"] == "unknown_parameter"
        assert unknown.json()["error"]["param"] == "mood"
        # A template that does not write the beginning token, so that one can be added.
        bare = post(found, "/tokenize", {"messages": [ASK]})["tokens"]
        more = post(found, "/tokenize", {"messages": [ASK], "add_special_tokens": True})["tokens"]
        assert more == post(found, "/tokenize", {"prompt": ASK["content"]})["tokens"]
        assert more[1:] == bare


@pytest.mark.slow
def test_logprobs_of_the_whole_vocabulary(folder):
    vocab = json.loads((folder / "config.json").read_text())["vocab_size"]
    limits = ServeLimits(request_logprobs=vocab * 16)
    with live_server(make_engine(folder, max_logprobs=vocab), limits=limits) as found:
        asked = {"prompt": [5, 6, 7], "prompt_logprobs": -1, "max_tokens": 1}
        first, *others = complete(found, **asked)["choices"][0]["prompt_logprobs"]
        assert first is None
        assert [len(entry) for entry in others] == [vocab, vocab]
        many = COMPLETION | asked | {"prompt": [5] * 17}
        refused = httpx2.post(f"{found.url}/v1/completions", json=many, timeout=60)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "prompt_logprobs"
