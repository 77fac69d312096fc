"""The small routes, as they should be used."""

import httpx2

import rjax

from .running import Running


def post(server: Running, path: str, **body) -> dict:
    found = httpx2.post(server.url + path, json=body, timeout=60)
    assert found.status_code == 200, found.text
    return found.json()


def test_text_to_tokens_and_back(server: Running):
    text = "Who lives in Peru? é 🙂"
    found = post(server, "/tokenize", prompt=text, return_token_strs=True)
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
    assert found["max_model_len"] == 512
    shown = post(server, "/detokenize", tokens=found["tokens"])["prompt"]
    assert shown == "<|begin|>" + text  # nothing is hidden
    bare = post(server, "/tokenize", prompt=text, add_special_tokens=False)["tokens"]
    assert bare == found["tokens"][1:]
    assert post(server, "/detokenize", tokens=bare) == {"prompt": text}
    used = post(server, "/v1/completions", prompt=text, max_tokens=1, return_token_ids=True)
    assert used["choices"][0]["prompt_token_ids"] == found["tokens"]


def test_messages_are_laid_out_as_for_a_chat(server: Running):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who?"}]
    found = post(server, "/tokenize", messages=messages)
    used = post(
        server, "/v1/chat/completions", messages=messages, max_tokens=1, return_token_ids=True
    )
    assert used["prompt_token_ids"] == found["tokens"]
    bare = post(server, "/tokenize", messages=messages, add_generation_prompt=False)
    assert found["tokens"][: bare["count"]] == bare["tokens"]


def test_a_prompt_is_cut_to_its_last_tokens(server: Running):
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


def test_what_this_is(server: Running):
    assert httpx2.get(server.url + "/version").json() == {"version": rjax.__version__}
    paths = httpx2.get(server.url + "/openapi.json").json()["paths"]
    assert {"/v1/completions", "/v1/chat/completions", "/v1/models", "/v1/prefixes"} <= set(paths)
    assert {"/tokenize", "/detokenize", "/health", "/metrics", "/version"} <= set(paths)
