"""Options and routes of vLLM's server, on a server that has them turned on."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from rjax.commands.serve.options import build_parser, serve_config
from rjax.serve.config.http_options import HttpOptions
from rjax.serve.config.limits import ServeLimits

from .live_server import LiveServer, live_server, make_engine

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n"
    "{% endfor %}"
)
ASK = {"role": "user", "content": "Who?"}
GREEDY = {"temperature": 0, "max_tokens": 4}


@pytest.fixture(scope="module")
def optioned(folder: Path) -> Iterator[LiveServer]:
    engine = make_engine(folder, chat_template=TEMPLATE, max_logprobs=10**6)
    http = HttpOptions(request_id_headers=True, tokenizer_info=True)
    with live_server(engine, http=http, return_tokens_as_token_ids=True) as found:
        yield found


def post(server: LiveServer, path: str, **body: Any) -> dict[str, Any]:
    found = httpx2.post(server.url + path, json=body, timeout=120)
    assert found.status_code == 200, found.text
    return found.json()


def test_a_role_of_its_own_reaches_the_template(optioned):
    def tokens(role: str, content: Any) -> list[int]:
        messages = [{"role": role, "content": content}]
        found = post(
            optioned, "/v1/chat/completions", messages=messages, return_token_ids=True, **GREEDY
        )
        assert found["prompt_token_ids"] == post(optioned, "/tokenize", messages=messages)["tokens"]
        return found["prompt_token_ids"]

    own = tokens("my-custom-role", "Who?")
    assert "my-custom-role: Who?" in post(optioned, "/detokenize", tokens=own)["prompt"]
    assert tokens("my-custom-role", [{"type": "text", "text": "Who?"}]) == own
    assert tokens("user", "Who?") != own


@pytest.mark.parametrize("role", ["critic", "", "x" * 10**6, 5, None])
def test_a_role_that_the_template_does_not_take_is_refused(server: LiveServer, role):
    body = {"messages": [{"role": role, "content": "a"}]}
    found = httpx2.post(server.url + "/v1/chat/completions", json=body, timeout=60)
    assert found.status_code == 400
    assert len(found.text) < 2000


def test_every_response_has_the_id_of_its_request(optioned, server: LiveServer):
    def request_id(path: str, given: bytes | None = None) -> str:
        headers = [] if given is None else [(b"X-Request-Id", given)]
        return httpx2.get(optioned.url + path, headers=headers, timeout=60).headers["x-request-id"]

    for path in ("/health", "/v1/models", "/nothing"):
        own = request_id(path)
        assert len(own) == 32 and int(own, 16) > 0
        assert request_id(path) != own
        assert request_id(path, b"Custom") == "Custom"
        for hostile in (b"x" * 129, b"\xe9", b"a\tb", b""):
            assert len(request_id(path, hostile)) == 32
    assert "x-request-id" not in httpx2.get(server.url + "/health", timeout=60).headers


def test_logprobs_have_token_ids_by_default(optioned):
    asked = {"prompt": [5, 6], "logprobs": 1, "return_token_ids": True, **GREEDY}
    [choice] = post(optioned, "/v1/completions", **asked)["choices"]
    wanted = [f"token_id:{token}" for token in choice["token_ids"]]
    assert choice["logprobs"]["tokens"] == wanted
    [choice] = post(optioned, "/v1/completions", **asked, return_tokens_as_token_ids=False)[
        "choices"
    ]
    assert not any(token.startswith("token_id:") for token in choice["logprobs"]["tokens"])
    chat = {"messages": [ASK], "logprobs": True, "return_token_ids": True, **GREEDY}
    [choice] = post(optioned, "/v1/chat/completions", **chat)["choices"]
    wanted = [f"token_id:{token}" for token in choice["token_ids"]]
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == wanted


def test_the_tokenizer_is_shown_as_its_configuration_file_has_it(optioned):
    found = httpx2.get(optioned.url + "/tokenizer_info", timeout=60).json()
    assert found["bos_token"] == "<|begin|>"
    assert found["chat_template"] == TEMPLATE
    assert found["added_tokens_decoder"]["1"] == {
        "content": "<|begin|>",
        "lstrip": False,
        "normalized": False,
        "rstrip": False,
        "single_word": False,
        "special": True,
    }


def test_max_logprobs_alone_allows_the_whole_vocabulary(optioned):
    vocab = optioned.service.alternatives.vocab_size
    asked = {"messages": [ASK], "prompt_logprobs": -1, "logprobs": "true", "top_logprobs": -1}
    found = post(optioned, "/v1/chat/completions", **asked, max_tokens=2, temperature=0)
    assert [len(entry) for entry in found["prompt_logprobs"][1:]] == [vocab] * (
        found["usage"]["prompt_tokens"] - 1
    )
    for entry in found["choices"][0]["logprobs"]["content"]:
        assert len(entry["top_logprobs"]) == vocab


def test_a_second_beginning_token_is_added_on_request(server: LiveServer):
    bos = server.service.tokenizer.bos_token_id
    messages = {"messages": [ASK]}
    plain = post(server, "/tokenize", **messages)["tokens"]
    assert plain[0] == bos
    more = {"add_special_tokens": True}
    assert post(server, "/tokenize", **messages, **more)["tokens"] == [bos, *plain]
    chat = post(
        server, "/v1/chat/completions", **messages, **more, return_token_ids=True, max_tokens=1
    )
    assert chat["prompt_token_ids"] == [bos, *plain]
    text = post(server, "/detokenize", tokens=plain)["prompt"]
    assert post(server, "/tokenize", prompt=text)["tokens"] == plain
    assert post(server, "/tokenize", prompt=text, **more)["tokens"] == [bos, *plain]
    found = post(
        server, "/v1/completions", prompt=text, **more, return_token_ids=True, max_tokens=1
    )
    assert found["choices"][0]["prompt_token_ids"] == [bos, *plain]


@pytest.mark.parametrize(
    ("route", "body"),
    [("/v1/chat/completions", {"messages": [ASK]}), ("/v1/completions", {"prompt": "Who?"})],
)
def test_an_invocation_is_a_chat_or_a_completion(server: LiveServer, route, body):
    wanted = post(server, route, **body, **GREEDY)
    found = post(server, "/invocations", **body, **GREEDY)
    assert found.keys() == wanted.keys()
    assert found["choices"] == wanted["choices"]
    stream = httpx2.post(
        server.url + "/invocations", json=body | GREEDY | {"stream": True}, timeout=60
    )
    assert stream.text.endswith("data: [DONE]\n\n")


def test_a_chat_has_every_field_that_openais_client_knows(server: LiveServer):
    found = post(server, "/v1/chat/completions", messages=[ASK], **GREEDY)
    assert {"service_tier", "system_fingerprint"} <= found.keys()
    message = found["choices"][0]["message"]
    nulls = ("refusal", "annotations", "audio", "function_call", "tool_calls")
    assert [message[name] for name in nulls] == [None] * 5


@pytest.mark.parametrize("body", [{}, {"input": "a"}, {"messages": None}])
def test_other_invocations_are_refused(server: LiveServer, body):
    found = httpx2.post(server.url + "/invocations", json=body, timeout=60)
    assert found.status_code == 400
    assert "messages, prompt" in found.json()["error"]["message"]


def test_the_flags():
    parser = build_parser()
    given = parser.parse_args(["--enable-request-id-headers", "--return-tokens-as-token-ids"])
    assert given.return_tokens_as_token_ids
    config = serve_config(given, ServeLimits())
    assert config.return_tokens_as_token_ids
    assert config.http.request_id_headers
    plain = serve_config(parser.parse_args([]), ServeLimits())
    assert not plain.return_tokens_as_token_ids
    assert not plain.http.request_id_headers
