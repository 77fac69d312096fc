"""The small routes, as they should be used."""

import re

import httpx2
import pytest

import rjax

from .hostile import Stream, until
from .live_server import LiveServer


def post(server: LiveServer, path: str, **body) -> dict:
    found = httpx2.post(server.url + path, json=body, timeout=60)
    assert found.status_code == 200, found.text
    return found.json()


def test_text_to_tokens_and_back(server: LiveServer):
    text = "Who lives in Peru? é 🙂"
    found = post(server, "/tokenize", prompt=text, return_token_strs=True)
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
    assert found["max_model_len"] == 512
    pieces = server.service.tokenizer.hf.convert_ids_to_tokens(found["tokens"])
    assert found["token_strs"] == pieces
    assert "\ufffd" not in "".join(pieces)  # as entries of the vocabulary, not as decoded text
    shown = post(server, "/detokenize", tokens=found["tokens"])["prompt"]
    assert shown == "<|begin|>" + text  # nothing is hidden
    bare = post(server, "/tokenize", prompt=text, add_special_tokens=False)["tokens"]
    assert bare == found["tokens"][1:]
    assert post(server, "/detokenize", tokens=bare) == {"prompt": text}
    used = post(server, "/v1/completions", prompt=text, max_tokens=1, return_token_ids=True)
    assert used["choices"][0]["prompt_token_ids"] == found["tokens"]


def test_messages_are_laid_out_as_for_a_chat(server: LiveServer):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who?"}]
    found = post(server, "/tokenize", messages=messages)
    used = post(
        server, "/v1/chat/completions", messages=messages, max_tokens=1, return_token_ids=True
    )
    assert used["prompt_token_ids"] == found["tokens"]
    bare = post(server, "/tokenize", messages=messages, add_generation_prompt=False)
    assert found["tokens"][: bare["count"]] == bare["tokens"]


def test_a_prompt_is_cut_to_its_last_tokens(server: LiveServer):
    text = "Who lives in Peru, and who in Chile?"
    whole = post(server, "/tokenize", prompt=text)["tokens"]
    for given, route in (
        ({"prompt": [text, text]}, "/v1/completions"),
        ({"prompt": whole}, "/v1/completions"),
        ({"messages": [{"role": "user", "content": text}]}, "/v1/chat/completions"),
    ):
        body = {**given, "max_tokens": 1, "return_token_ids": True, "temperature": 0}
        long = post(server, route, **body, truncate_prompt_tokens=10**6)
        short = post(server, route, **body, truncate_prompt_tokens=4)
        assert short["usage"]["prompt_tokens"] == 4 * len(short["choices"])
        for old, new in zip(long["choices"], short["choices"], strict=True):
            tokens = (old if "prompt_token_ids" in old else long)["prompt_token_ids"]
            found = (new if "prompt_token_ids" in new else short)["prompt_token_ids"]
            assert found == tokens[-4:]
    echoed = post(
        server, "/v1/completions", prompt=text, echo=True, max_tokens=0, truncate_prompt_tokens=1
    )
    assert echoed["choices"][0]["text"] == "?"


def test_what_this_is(server: LiveServer):
    assert httpx2.get(server.url + "/version", timeout=60).json() == {"version": rjax.__version__}
    paths = httpx2.get(server.url + "/openapi.json", timeout=60).json()["paths"]
    assert {"/v1/completions", "/v1/chat/completions", "/v1/models", "/v1/prefixes"} <= set(paths)
    assert {"/tokenize", "/detokenize", "/health", "/metrics", "/version"} <= set(paths)
    assert {"/v1/responses", "/ping", "/load", "/tokenizer_info"} <= set(paths)


def test_the_model_as_vllm_tells_it(server: LiveServer):
    [card] = httpx2.get(server.url + "/v1/models", timeout=60).json()["data"]
    assert card == httpx2.get(server.url + "/v1/models/tiny", timeout=60).json()
    assert {name: card[name] for name in ("id", "object", "root", "parent", "max_model_len")} == {
        "id": "tiny", "object": "model", "root": "tiny", "parent": None, "max_model_len": 512
    }  # fmt: skip
    [permission] = card["permission"]
    assert permission["object"] == "model_permission"
    assert permission["allow_sampling"]
    assert not permission["allow_fine_tuning"]


def test_probes(server: LiveServer):
    for method, path in (("GET", "/health"), ("GET", "/ping"), ("POST", "/ping")):
        found = httpx2.request(method, server.url + path, timeout=60)
        assert (found.status_code, found.json()) == (200, {"status": "ready"})


def test_load_counts_what_runs(server: LiveServer):
    def load() -> int:
        return httpx2.get(server.url + "/load", timeout=60).json()["server_load"]

    server.wait_idle()
    assert load() == 0
    body = {"prompt": ["a", "b", "c"], "max_tokens": 150, "ignore_eos": True, "temperature": 0}
    stream = Stream(server, body)
    assert stream.begun.wait(60)
    assert load() == 3
    stream.join(60)
    until(lambda: load() == 0)


def test_the_tokenizer_is_shown_only_where_that_is_wanted(server: LiveServer):
    found = httpx2.get(server.url + "/tokenizer_info", timeout=60)
    assert found.status_code == 404
    assert "--enable-tokenizer-info-endpoint" in found.json()["error"]["message"]


def test_the_page_of_the_routes_loads_nothing(server: LiveServer):
    found = httpx2.get(server.url + "/docs", timeout=60)
    assert found.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in found.headers["content-security-policy"]
    for path in httpx2.get(server.url + "/openapi.json", timeout=60).json()["paths"]:
        assert f"<code>{path}</code>" in found.text
    assert not re.search(r"<(script|link|img|iframe)|src=|url\(|@import|https?://", found.text)
    for target in re.findall(r'href="#([^"]*)"', found.text):
        assert f'id="{target}"' in found.text


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/rerank", "/v1/score", "/pooling"])
def test_what_a_generating_model_does_not_do(server: LiveServer, path):
    found = httpx2.post(server.url + path, json={"model": "tiny", "input": "a"}, timeout=60)
    assert found.status_code == 404
    assert found.json()["error"]["code"] == "not_supported"
    assert "'tiny' generates text" in found.json()["error"]["message"]
