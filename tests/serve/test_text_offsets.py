"""Positions of tokens in the returned text, and the bytes of tokens."""

import json
from typing import Any

import httpx2
import pytest

from rjax.sampling import SamplingParams
from rjax.serve.api.text_offsets import TextOffsets, prompt_offsets
from rjax.tokenization import Tokenizer
from tests.frontend.tiny_tokenizers import build

from .live_server import LiveServer

SMILE = "😀!"


def expected_offsets(tokenizer: Tokenizer, ids: list[int], text: str) -> list[int]:
    """Each token starts behind the complete characters of the tokens before it."""
    texts = [tokenizer.decode(ids[:i]).rstrip("\ufffd") for i in range(len(ids))]
    assert all(text.startswith(part) for part in texts)
    return [len(part) for part in texts]


@pytest.mark.parametrize("kind", ["byte_level", "byte_level_bos", "metaspace_first", "unigram"])
def test_prompts(kind):
    tokenizer = build(kind)
    for text in ("xyA", "Name: Ann, naïve", "a  b", "a🙂你", "<|im_start|>a b<|im_end|>"):
        ids = tokenizer.encode(text)
        found = prompt_offsets(tokenizer, ids, text)
        assert found[0] == 0
        assert found == sorted(found)
        if tokenizer.leading_special_text:
            assert found[1] == 0  # the BOS token is not in the text
        shown = tokenizer.decode(ids, skip_special_tokens=False)
        if "<|im" not in text and kind != "unigram":
            assert found == expected_offsets(tokenizer, ids, text)
        last = len(tokenizer.token_text(ids[-1]))
        assert "\ufffd" in tokenizer.token_text(ids[-1]) or found[-1] + last == len(text)
        # A prompt of token ids is given back with its special tokens.
        whole = prompt_offsets(tokenizer, ids, shown)
        assert whole[-1] == len(shown) - (len(text) - found[-1])


@pytest.mark.parametrize("kind", ["byte_level_bos", "metaspace_first", "metaspace_always"])
def test_a_leading_space_is_a_character(kind):
    tokenizer = build(kind)
    text = " a  b"
    ids = tokenizer.encode(text)
    found = prompt_offsets(tokenizer, ids, text)
    assert found[:2] == [0, 0]
    shown = [tokenizer.token_text(i) for i in ids[1:]]
    assert text.endswith("".join(shown).lstrip(" "))
    for offset, token in list(zip(found[1:], shown, strict=True))[1:]:
        assert text.startswith(token, offset)


@pytest.mark.parametrize("kind", ["byte_level", "metaspace_first"])
def test_parts_of_a_character_start_where_it_does(kind):
    tokenizer = build(kind)
    ids = tokenizer.encode(SMILE, add_special_tokens=False)
    *parts, last = TextOffsets(tokenizer, [], SamplingParams(), 7).add(ids)
    assert len(parts) > 1
    assert (set(parts), last) == ({7}, 8)
    # Hidden special tokens take no place, shown ones their text's.
    end = tokenizer.hf.convert_tokens_to_ids("<|im_end|>")
    for skip, length in ((True, 0), (False, len("<|im_end|>"))):
        params = SamplingParams(skip_special_tokens=skip)
        offsets = TextOffsets(tokenizer, [], params, 0)
        first = offsets.add([end])
        assert first == [0]
        assert offsets.add(ids)[0] == length


def forced(server: LiveServer, text: str) -> dict[str, Any]:
    """Fields of a request whose output is this text."""
    return {"structured_outputs": {"choice": [text]}, "temperature": 0, "max_tokens": 40}


def post(server: LiveServer, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = httpx2.post(f"{server.url}/v1/{path}", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def events(server: LiveServer, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    answer = httpx2.post(f"{server.url}/v1/{path}", json={**body, "stream": True}, timeout=60)
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines()]
    return [json.loads(line) for line in lines if line.startswith("{")]


def test_offsets_of_completions(server: LiveServer):
    tokenizer = server.service.tokenizer
    prompt = "é 你xy"
    body = {"prompt": prompt, "logprobs": 1, **forced(server, SMILE)}
    for echo in (False, True):
        (choice,) = post(server, "completions", {**body, "echo": echo})["choices"]
        before = prompt if echo else ""
        text = choice["text"]
        assert text == before + SMILE
        found = choice["logprobs"]
        made = tokenizer.encode(prompt) if echo else []
        offsets = found["text_offset"][len(made) :]
        *parts, mark, end = offsets if found["tokens"][-1] != "!" else [*offsets, len(text)]
        assert len(parts) > 1
        assert (set(parts), mark, end) == ({len(before)}, len(before) + 1, len(text))
        for offset, token in zip(found["text_offset"], found["tokens"], strict=True):
            assert "\ufffd" in token or text.startswith(token, offset) or offset in (0, len(text))
        chunks = [e["choices"][0] for e in events(server, "completions", {**body, "echo": echo})]
        streamed = [o for c in chunks if c["logprobs"] for o in c["logprobs"]["text_offset"]]
        assert streamed == found["text_offset"]


def test_a_bos_token_takes_no_place_in_an_echo(server: LiveServer):
    body = {"prompt": "xy", "logprobs": 1, "echo": True, **forced(server, "A")}
    (choice,) = post(server, "completions", body)["choices"]
    found = choice["logprobs"]
    assert choice["text"] == "xyA"
    given = server.service.tokenizer.encode("xy")
    places = found["text_offset"][: len(given) + 1]
    assert places[-1] == 2  # of "A"
    assert places[: len(given)] == prompt_offsets(server.service.tokenizer, given, "xy")
    assert max(places) <= len("xyA")


def test_a_stop_string_cuts_the_offsets(server: LiveServer):
    body = {"prompt": "a", "logprobs": 0, **forced(server, "one two three"), "stop": "e tw"}
    (choice,) = post(server, "completions", body)["choices"]
    assert choice["text"] == "on"
    assert max(choice["logprobs"]["text_offset"]) <= 2


def test_bytes_of_parts_of_characters(server: LiveServer):
    body = forced(server, SMILE)
    chat = {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 2}

    def check(entries: list[dict[str, Any]]) -> None:
        assert b"".join(bytes(entry["bytes"]) for entry in entries).decode() == SMILE
        assert sum("\ufffd" in entry["token"] for entry in entries) > 1
        for entry in entries:
            for top in entry["top_logprobs"]:
                assert bytes(top["bytes"]).decode(errors="replace") == top["token"]

    def without_end(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [entry for entry in entries if not entry["token"].startswith("<|")]

    (choice,) = post(server, "chat/completions", {**chat, **body})["choices"]
    check(without_end(choice["logprobs"]["content"]))
    chunks = [event["choices"][0] for event in events(server, "chat/completions", {**chat, **body})]
    found = [chunk["logprobs"]["content"] for chunk in chunks if chunk["logprobs"]]
    check(without_end([entry for entries in found for entry in entries]))
    del body["max_tokens"]
    asked = {"input": "a", "include": ["message.output_text.logprobs"], "top_logprobs": 2, **body}
    (item,) = post(server, "responses", asked)["output"]
    check(without_end(item["content"][0]["logprobs"]))
    deltas = [e for e in events(server, "responses", asked) if e["type"].endswith("text.delta")]
    check(without_end([entry for delta in deltas for entry in delta["logprobs"]]))
