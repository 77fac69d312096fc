"""``use_beam_search``: the most likely texts, as `LLM.beam_search` finds them."""

import pytest

from rjax.api.beam_search import BeamSearchParams, run_beam_search
from tests.serve.test_hostile_clients import slowed

PROMPT = [5, 9, 20, 31]
CHAT = {"messages": [{"role": "user", "content": "Who?"}]}
BEAMS = {"use_beam_search": True, "max_tokens": 6}


@pytest.fixture(scope="module")
def offline(server):
    """Beams of the same engine, by the offline search, with the logprob of each."""

    def search(prompt: list[int], **options) -> list[tuple[list[int], float]]:
        params = BeamSearchParams(max_tokens=6, **options)
        server.wait_idle()
        [found] = server.call(lambda engine: run_beam_search(engine, [prompt], params, "offline"))
        return [(beam.token_ids, beam.cumulative_logprob) for beam in found.outputs]

    return search


@pytest.mark.parametrize("length_penalty", [1.0, -2.0])
def test_the_beams_are_those_of_the_offline_search(post, offline, length_penalty):
    more = {"n": 3, "length_penalty": length_penalty, "return_token_ids": True, "logprobs": 2}
    status, found = post("/v1/completions", prompt=PROMPT, **BEAMS | more)
    assert status == 200, found
    wanted = offline(PROMPT, beam_width=3, length_penalty=length_penalty)
    assert [choice["token_ids"] for choice in found["choices"]] == [t for t, _ in wanted]
    for choice, (tokens, total) in zip(found["choices"], wanted, strict=True):
        logprobs = choice["logprobs"]
        assert sum(logprobs["token_logprobs"]) == pytest.approx(total, abs=1e-3)
        assert len(logprobs["tokens"]) == len(tokens)
        assert all(2 <= len(top) <= 3 for top in logprobs["top_logprobs"])
    assert [choice["index"] for choice in found["choices"]] == [0, 1, 2]
    assert found["usage"]["prompt_tokens"] == len(PROMPT)
    assert found["usage"]["completion_tokens"] == sum(len(tokens) for tokens, _ in wanted)


def test_each_prompt_has_its_own_search(post):
    _, both = post("/v1/completions", prompt=[PROMPT, [7, 8], PROMPT], n=2, **BEAMS)
    texts = [choice["text"] for choice in both["choices"]]
    assert len(texts) == 6
    assert texts[:2] == texts[4:]
    assert texts[0] != texts[1]
    _, alone = post("/v1/completions", prompt=[7, 8], n=2, **BEAMS)
    assert [choice["text"] for choice in alone["choices"]] == texts[2:4]


def test_a_beam_ends_at_a_stop_token(post):
    _, first = post("/v1/completions", prompt=PROMPT, return_token_ids=True, **BEAMS)
    [choice] = first["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("length", None)
    assert len(choice["token_ids"]) == 6
    end = choice["token_ids"][0]
    more = {"stop_token_ids": [end], "n": 2, "length_penalty": -9, "return_token_ids": True}
    _, found = post("/v1/completions", prompt=PROMPT, **BEAMS | more)
    best = found["choices"][0]
    assert (best["finish_reason"], best["stop_reason"]) == ("stop", end)
    assert (best["token_ids"], best["text"]) == ([end], "")
    more["include_stop_str_in_output"] = True
    _, kept = post("/v1/completions", prompt=PROMPT, **BEAMS | more)
    assert kept["choices"][0]["text"] == post("/detokenize", tokens=[end])[1]["prompt"]


def test_a_chat_is_searched_too(post, offline):
    asked = {"n": 2, "logprobs": True, "top_logprobs": 1, "return_token_ids": True}
    status, found = post("/v1/chat/completions", **CHAT | BEAMS | asked)
    assert status == 200, found
    wanted = offline(found["prompt_token_ids"], beam_width=2)
    assert [choice["token_ids"] for choice in found["choices"]] == [t for t, _ in wanted]
    for choice, (_, total) in zip(found["choices"], wanted, strict=True):
        content = choice["logprobs"]["content"]
        assert sum(entry["logprob"] for entry in content) == pytest.approx(total, abs=1e-3)
        assert all(len(entry["top_logprobs"]) == 1 for entry in content)
        assert "".join(entry["token"] for entry in content) == choice["message"]["content"]


def test_a_search_ends_with_the_models_length(post):
    prompt = [5] * 508
    _, found = post("/v1/completions", prompt=prompt, **BEAMS | {"max_tokens": 50}, n=2)
    assert found["usage"]["completion_tokens"] == 2 * 4
    assert {choice["finish_reason"] for choice in found["choices"]} == {"length"}


@pytest.mark.parametrize(
    "more",
    [
        {"stream": True},
        {"temperature": 0.5},
        {"top_p": 0.9},
        {"top_k": 3},
        {"presence_penalty": 1},
        {"repetition_penalty": 1.1},
        {"stop": ["a"]},
        {"min_tokens": 2},
        {"logit_bias": {"5": 1}},
        {"allowed_token_ids": [5]},
        {"prompt_logprobs": 1},
        {"best_of": 2},
        {"echo": True, "logprobs": 1},
        {"echo": True, "max_tokens": 0},
    ],
    ids=lambda more: next(iter(more)),
)
def test_fields_that_a_search_cannot_follow_are_refused(refused, more):
    message = refused("/v1/completions", prompt=PROMPT, **BEAMS | more)
    assert message.startswith(next(iter(more)))
    assert "use_beam_search" in message
    assert "\n" not in message


def test_a_search_is_within_the_limits(refused):
    assert "max_logprobs" in refused("/v1/completions", prompt=PROMPT, n=11, **BEAMS)
    assert "sequences" in refused("/v1/completions", prompt=[PROMPT] * 64, n=5, **BEAMS)
    formed = {"response_format": {"type": "json_object"}}
    assert "use_beam_search" in refused("/v1/chat/completions", **CHAT | BEAMS | formed)


def test_a_length_penalty_needs_a_search(refused, post):
    message = refused("/v1/completions", prompt=PROMPT, length_penalty=2)
    assert "use_beam_search" in message
    assert post("/v1/completions", prompt=PROMPT, max_tokens=1, length_penalty=1)[0] == 200


def test_a_vanished_client_ends_its_search(http, server):
    body = {
        "prompt": PROMPT,
        "n": 4,
        "max_tokens": 500,
        "ignore_eos": True,
        "use_beam_search": True,
    }
    server.wait_idle()
    before = server.call(lambda engine: engine.stats()).steps
    with slowed(server, 0.02):
        with pytest.raises(Exception, match="timed out"):
            http.post("/v1/completions", json=body, timeout=0.5)
        server.wait_idle()
    assert server.call(lambda engine: engine.stats()).steps - before < 250
