"""Logprobs of outputs and, with echo, of prompts."""

import json
import math

import pytest

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "Who lives in Peru?"}]


@pytest.mark.parametrize("count", [0, 1, 5])
def test_each_token_has_as_many_alternatives_as_asked(post, count):
    _, found = post(COMPLETIONS, prompt="a", max_tokens=4, logprobs=count)
    logprobs = found["choices"][0]["logprobs"]
    assert len(logprobs["tokens"]) == len(logprobs["token_logprobs"]) == 4
    for chosen, value, top in zip(
        logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
    ):
        # The chosen token is among them, beside as many as asked for.
        assert max(1, count) <= len(top) <= count + 1
        assert top[chosen] == value


def test_offsets_are_where_tokens_begin_in_the_text(post):
    given = {"prompt": "Who lives in Peru?", "max_tokens": 6, "logprobs": 1}
    for echo in (False, True):
        choice = post(COMPLETIONS, echo=echo, **given)[1]["choices"][0]
        offsets = choice["logprobs"]["text_offset"]
        assert len(offsets) == len(choice["logprobs"]["tokens"])
        assert offsets == sorted(offsets)
        assert offsets[0] == 0 if echo else offsets[0] >= 0
        assert offsets[-1] <= len(given["prompt"]) + len(choice["text"])


def test_echo_scores_a_batch_as_each_prompt_alone(post):
    prompts = ["Who lives in Peru?", "How old?", "a"]
    given = {"max_tokens": 1, "logprobs": 1, "echo": True}
    together = post(COMPLETIONS, prompt=prompts, **given)[1]["choices"]
    for prompt, choice in zip(prompts, together, strict=True):
        alone = post(COMPLETIONS, prompt=prompt, **given)[1]["choices"][0]
        assert choice["text"] == alone["text"]
        assert choice["text"].startswith(prompt)
        one, other = (c["logprobs"]["token_logprobs"] for c in (choice, alone))
        assert one[0] is None
        assert one[1:] == pytest.approx(other[1:], abs=1e-4)


def test_prompt_logprobs_give_each_prompt_token_its_rank(post):
    _, found = post(COMPLETIONS, prompt="Who lives?", max_tokens=1, prompt_logprobs=2)
    _, ids = post("/tokenize", prompt="Who lives?")
    scored = found["choices"][0]["prompt_logprobs"]
    assert scored[0] is None
    assert len(scored) == ids["count"]
    for token, entry in zip(ids["tokens"][1:], scored[1:], strict=True):
        assert str(token) in entry
        assert {1, 2} <= {value["rank"] for value in entry.values()}
        assert all(math.isfinite(value["logprob"]) for value in entry.values())


def test_chat_alternatives_are_counted_apart_from_the_chosen(post):
    for count in (0, 3):
        _, found = post(CHAT, messages=HI, max_tokens=3, logprobs=True, top_logprobs=count)
        content = found["choices"][0]["logprobs"]["content"]
        assert [len(token["top_logprobs"]) for token in content] == [count] * 3


@pytest.mark.parametrize("given", [{"top_logprobs": 3}, {"logprobs": True, "top_logprobs": 21}])
def test_chat_refuses_alternatives_without_logprobs_or_too_many(refused, given):
    assert "logprobs" in refused(CHAT, messages=HI, **given)


def test_logprobs_of_tokens_that_a_choice_rules_out_are_numbers(http):
    given = {"model": "tiny", "temperature": 0, "max_tokens": 8}
    given |= {"structured_outputs": {"choice": ["Peru", "Chile"]}}

    def no_constant(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    chat = {**given, "messages": HI, "logprobs": True, "top_logprobs": 20}
    for route, body in ((CHAT, chat), (COMPLETIONS, {**given, "prompt": "Who?", "logprobs": 20})):
        for stream in (False, True):
            answer = http.post(route, json={**body, "stream": stream})
            assert answer.status_code == 200
            events = answer.text.splitlines() if stream else [answer.text]
            found = [line.removeprefix("data: ") for line in events if "{" in line]
            for line in found:
                choice = json.loads(line, parse_constant=no_constant)["choices"][0]
                values = _values(choice["logprobs"])
                assert all(math.isfinite(value) and value <= 0 for value in values)


def _values(logprobs):
    """All logprobs of an answer or a chunk of it."""
    if logprobs is None:
        return []
    if "content" in logprobs:
        return [top["logprob"] for token in logprobs["content"]
                for top in (token, *token["top_logprobs"])]  # fmt: skip
    tops = [value for top in logprobs["top_logprobs"] for value in top.values()]
    return [*logprobs["token_logprobs"], *tops]


def test_three_views_of_the_same_tokens_agree(post):
    given = {"prompt": "Who lives in Peru?", "max_tokens": 5, "logprobs": 1, "echo": True}
    given |= {"prompt_logprobs": 1, "return_token_ids": True, "return_tokens_as_token_ids": True}
    choice = post(COMPLETIONS, **given)[1]["choices"][0]
    ids = [*choice["prompt_token_ids"], *choice["token_ids"]]
    assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in ids]
    scored = choice["prompt_logprobs"]
    assert scored[0] is None and choice["logprobs"]["token_logprobs"][0] is None
    for i, token in enumerate(choice["prompt_token_ids"][1:], start=1):
        assert scored[i][str(token)]["logprob"] == choice["logprobs"]["token_logprobs"][i]


def chances(choice):
    """Probabilities of each token's alternatives in a choice of either route."""
    logprobs = choice["logprobs"]
    if "content" in logprobs:
        return [
            [math.exp(other["logprob"]) for other in token["top_logprobs"]]
            for token in logprobs["content"]
        ]
    return [[math.exp(value) for value in top.values()] for top in logprobs["top_logprobs"]]


@pytest.mark.parametrize(
    ("route", "given"),
    [
        (COMPLETIONS, {"prompt": "a", "logprobs": 2}),
        (CHAT, {"messages": HI, "logprobs": True, "top_logprobs": 2}),
    ],
)
def test_processed_logprobs_are_those_of_what_is_sampled_from(post, refused, http, route, given):
    sampling = {"temperature": 1.5, "top_k": 2, "seed": 3, "max_tokens": 4, "ignore_eos": True}
    body = {"model": "tiny", **sampling, **given}
    raw, processed = (
        post(route, **body, logprobs_mode=mode)[1]["choices"][0]
        for mode in ("raw_logprobs", "processed_logprobs")
    )
    assert chances(post(route, **body)[1]["choices"][0]) == chances(raw)
    for of_raw, of_processed in zip(chances(raw), chances(processed), strict=True):
        assert sum(of_processed) == pytest.approx(1, abs=1e-6)
        assert sum(of_raw) < 0.99
        heated = [chance ** (1 / 1.5) for chance in of_raw]
        want = [chance / sum(heated) for chance in heated]
        assert sorted(of_processed) == pytest.approx(sorted(want), abs=1e-5)
    streamed = []
    with http.stream(
        "POST", route, json={**body, "logprobs_mode": "processed_logprobs", "stream": True}
    ) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    streamed += chances(choice) if choice.get("logprobs") else []
    assert streamed == chances(processed)
    assert "give 'raw_logprobs' or" in refused(route, **given, logprobs_mode="raw_logits")
