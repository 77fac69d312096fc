"""POST /v1/completions: prompts of every form, stop conditions, refusals."""

import json

import pytest

from rjax.sampling import LIMITS

ROUTE = "/v1/completions"


def test_a_prompt_as_token_ids_is_the_same_prompt(post):
    texts = ["Who lives in Peru?", "How old is Ann?"]
    ids = [post("/tokenize", prompt=text)[1]["tokens"] for text in texts]
    forms = {
        "text": [post(ROUTE, prompt=text, max_tokens=5)[1] for text in texts],
        "ids": [post(ROUTE, prompt=one, max_tokens=5)[1] for one in ids],
    }
    alone = [[answer["choices"][0]["text"] for answer in form] for form in forms.values()]
    assert alone[0] == alone[1]
    for batch in (texts, ids):
        choices = post(ROUTE, prompt=batch, max_tokens=5)[1]["choices"]
        assert [choice["index"] for choice in choices] == [0, 1]
        assert [choice["text"] for choice in choices] == alone[0]


def test_one_text_in_a_list_is_one_prompt(post):
    one = post(ROUTE, prompt="a", max_tokens=4)[1]["choices"]
    assert post(ROUTE, prompt=["a"], max_tokens=4)[1]["choices"] == one


def test_n_gives_each_prompt_its_samples_side_by_side(post):
    given = {"temperature": 1, "seed": 4, "max_tokens": 6}
    choices = post(ROUTE, prompt=["a", "b"], n=3, **given)[1]["choices"]
    assert [choice["index"] for choice in choices] == list(range(6))
    alone = post(ROUTE, prompt="b", n=3, **given)[1]["choices"]
    assert [c["text"] for c in choices[3:]] == [c["text"] for c in alone]


@pytest.mark.parametrize("given", [{}, {"n": 2, "temperature": 1, "seed": 3}], ids=["one", "n"])
def test_a_batch_streams_what_it_answers(http, post, given):
    body = {"prompt": ["Who lives in Peru?", "How old is Ann?", "a"], "max_tokens": 5, **given}
    whole = post(ROUTE, **body)[1]["choices"]
    texts = [""] * len(whole)
    ends: list[int] = []
    more = {"model": "tiny", "temperature": 0, **body, "stream": True}
    with http.stream("POST", ROUTE, json=more) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line.removeprefix("data: "))["choices"]:
                    assert choice["index"] not in ends
                    texts[choice["index"]] += choice["text"]
                    ends += [choice["index"]] if choice["finish_reason"] else []
    assert texts == [choice["text"] for choice in whole]
    assert sorted(ends) == list(range(len(whole)))


def test_a_bias_forces_a_token_and_bans_one(post):
    given = {"prompt": "a", "max_tokens": 5, "return_token_ids": True}
    plain = post(ROUTE, **given)[1]["choices"][0]["token_ids"]
    forced = post(ROUTE, logit_bias={"77": 100}, **given)[1]["choices"][0]["token_ids"]
    assert forced == [77] * 5
    banned = post(ROUTE, logit_bias={str(plain[0]): -100}, **given)[1]["choices"][0]["token_ids"]
    assert plain[0] not in banned


def test_an_answer_ends_where_the_model_does(post, refused):
    _, found = post(ROUTE, prompt=[77] * 500, max_tokens=40, ignore_eos=True)
    assert found["choices"][0]["finish_reason"] == "length"
    assert found["usage"]["total_tokens"] <= 512
    assert "512" in refused(ROUTE, prompt=[77] * 512, max_tokens=1)


def test_min_tokens_keeps_the_end_away(post):
    _, found = post(ROUTE, prompt="a", max_tokens=6, min_tokens=6)
    assert found["usage"]["completion_tokens"] == 6
    assert found["choices"][0]["finish_reason"] == "length"


def test_a_stop_token_ends_with_its_id_as_the_reason(post):
    ids = post(ROUTE, prompt="a", max_tokens=8, return_token_ids=True)[1]["choices"][0]
    stop = ids["token_ids"][3]
    first = ids["token_ids"].index(stop)
    _, found = post(ROUTE, prompt="a", max_tokens=8, stop_token_ids=[stop])
    choice = found["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["stop_reason"] == stop
    assert found["usage"]["completion_tokens"] == first + 1


def test_allowed_token_ids_are_the_only_ones(post):
    _, found = post(
        ROUTE, prompt="a", max_tokens=8, allowed_token_ids=[77, 78], return_token_ids=True
    )
    assert set(found["choices"][0]["token_ids"]) <= {77, 78}


def test_the_server_takes_what_the_engine_takes(post):
    """lm-eval's humaneval sends nine stop strings."""
    stop = [
        f"\n{word}"
        for word in ["class", "def", "if", "print", "for", "while", "try", "with", "return"]
    ]
    ids = list(range(100, 100 + LIMITS.stop_token_ids))
    more = [str(i) for i in range(LIMITS.stop_strings - len(stop))]
    status, found = post(ROUTE, prompt="a", max_tokens=3, stop=stop + more, stop_token_ids=ids)
    assert status == 200, found


def test_two_names_of_max_tokens(post):
    """guidellm sends both."""
    wanted = post(ROUTE, prompt="a", max_tokens=3)[1]["choices"]
    for given in ({"max_tokens": 3, "max_completion_tokens": 3}, {"max_completion_tokens": 3}):
        assert post(ROUTE, prompt="a", **given)[1]["choices"] == wanted
    scored = {"echo": True, "logprobs": 0, "return_token_ids": True}
    wanted = post(ROUTE, prompt="a", max_tokens=0, **scored)[1]
    found = post(ROUTE, prompt="a", max_completion_tokens=0, **scored)[1]
    assert found["choices"] == wanted["choices"]
    assert found["usage"] == wanted["usage"]


def test_truncation_to_what_fits(post):
    """-1 keeps the end of the prompt that leaves room for max_tokens."""
    ids = [*range(40, 140)] * 6
    for form, given in ((ids, {}), ("Who lives in Peru? " * 300, {"add_special_tokens": False})):
        given = {"prompt": form, "max_tokens": 7, "ignore_eos": True, **given}
        status, found = post(ROUTE, truncate_prompt_tokens=-1, return_token_ids=True, **given)
        assert status == 200, found
        assert found["usage"]["prompt_tokens"] == 512 - 7
        assert found["usage"]["completion_tokens"] == 7
        if form is ids:
            assert found["choices"][0]["prompt_token_ids"] == ids[-505:]
    assert (
        post(ROUTE, prompt="a", truncate_prompt_tokens=-1)[1]["choices"]
        == post(ROUTE, prompt="a")[1]["choices"]
    )
    chat = {"messages": [{"role": "user", "content": "Who lives in Peru? " * 300}]}
    status, found = post("/v1/chat/completions", truncate_prompt_tokens=-1, max_tokens=9, **chat)
    assert (status, found["usage"]["prompt_tokens"]) == (200, 503)
    status, found = post("/v1/chat/completions", truncate_prompt_tokens=-1, **chat)
    assert (status, found["usage"]["prompt_tokens"]) == (200, 511)


def test_negative_seeds(post):
    """-1 draws a seed; others are as good as positive ones."""
    given = {"prompt": "a", "max_tokens": 24, "temperature": 2, "ignore_eos": True}

    def text(seed: int) -> str:
        status, found = post(ROUTE, seed=seed, **given)
        assert status == 200, found
        return found["choices"][0]["text"]

    assert text(-2) == text(-2)
    assert text(-2) != text(2)
    assert text(-1) != text(-1)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": "", "add_special_tokens": False}, "prompt"),
        ({"prompt": ["a", ""], "add_special_tokens": False}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [-1]}, "-1"),
        ({"prompt": [10**6]}, "1000000"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"logprobs": 21}, "logprobs"),
        ({"prompt_logprobs": -2}, "prompt_logprobs"),
        ({"logit_bias": {"1000000": 1}}, "logit_bias"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [10**6]}, "allowed_token_ids"),
        ({"stop": list("abcdefghijklmnopq")}, "stop"),
        ({"max_completion_tokens": 3}, "max_completion_tokens"),
        ({"max_completion_tokens": 0, "max_tokens": 0}, "max_tokens"),
        ({"truncate_prompt_tokens": -1, "max_tokens": 512}, "truncate_prompt_tokens"),
        ({"seed": -(2**63) - 1}, "seed"),
        ({"stop": [""]}, "stop"),
        ({"suffix": "b"}, "suffix"),
        ({"stream_options": {"include_usage": True}}, "stream"),
        ({"echo": True, "max_tokens": 2, "prompt": "a " * 600}, "512"),
    ],
    ids=str,
)
def test_a_refusal_names_the_field(refused, given, said):
    assert said in refused(ROUTE, **{"prompt": "a", "max_tokens": 2, **given})


@pytest.mark.parametrize("body", [b"", b"[]", b"1", b"{", b'"a"', b'{"model": "tiny",}'])
def test_a_body_that_is_no_object_is_refused(http, body):
    answer = http.post(ROUTE, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "kind", ["application/x-www-form-urlencoded", "text/plain", "multipart/form-data", ""]
)
@pytest.mark.parametrize("route", [ROUTE, "/v1/chat/completions", "/v1/responses", "/tokenize"])
def test_a_body_of_another_content_type_is_refused(http, route, kind):
    body = json.dumps({"prompt": "a", "messages": [{"role": "user", "content": "a"}], "input": "a"})
    answer = http.post(route, content=body.encode(), headers={"content-type": kind})
    assert answer.status_code == 400
    assert "application/json" in answer.json()["error"]["message"]
