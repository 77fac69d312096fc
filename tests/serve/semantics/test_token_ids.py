"""Token ids in answers, /tokenize and /detokenize: three views of the same tokens."""

import json

import pytest

HI = [{"role": "user", "content": "Who lives in Peru?"}]
PROMPTS = ["Who lives in Peru?", "vLLM's 32 tokens", "naïve 東京 🙂", " leading", "two\nlines\n"]


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("prompt", PROMPTS)
def test_detokenise_undoes_tokenise(post, prompt, special):
    status, found = post("/tokenize", prompt=prompt, add_special_tokens=special)
    assert status == 200
    assert found["count"] == len(found["tokens"])
    assert found["max_model_len"] == 512
    _, back = post("/detokenize", tokens=found["tokens"])
    assert back["prompt"].endswith(prompt)
    if not special:
        assert back["prompt"] == prompt


def test_a_conversation_has_the_tokens_that_chat_counts(post):
    _, tokens = post("/tokenize", messages=HI)
    _, answer = post("/v1/chat/completions", messages=HI, max_tokens=1, return_token_ids=True)
    assert answer["prompt_token_ids"] == tokens["tokens"]
    assert answer["usage"]["prompt_tokens"] == tokens["count"]
    _, shorter = post("/tokenize", messages=HI, add_generation_prompt=False)
    assert tokens["tokens"][: shorter["count"]] == shorter["tokens"]
    assert shorter["count"] < tokens["count"]


def test_a_prompt_of_messages_is_laid_out(post, refused):
    """What lm-eval's remote tokenizer sends with a chat template."""
    _, wanted = post("/tokenize", messages=HI)
    assert post("/tokenize", prompt=HI, add_special_tokens=False)[1] == wanted
    assert "entries" in refused("/tokenize", prompt=HI * 5000)
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}] * 5000}]
    assert "parts" in refused("/tokenize", prompt=parts)
    for prompt in ([], [1], ["a"], [HI[0], 1], [{"role": "x", "content": "a"}], {"role": "user"}):
        refused("/tokenize", prompt=prompt)
    refused("/v1/completions", prompt=HI)


@pytest.mark.parametrize("tokens", [[-1], [10**6], "a", None, [1.5], [[1]]])
def test_detokenise_refuses_what_is_no_token(refused, tokens):
    assert "token" in refused("/detokenize", tokens=tokens)


@pytest.mark.parametrize("body", [{}, {"prompt": 1}, {"prompt": "a", "messages": HI}])
def test_tokenise_takes_a_prompt_or_messages(refused, body):
    assert "prompt" in refused("/tokenize", **body) or "messages" in refused("/tokenize", **body)


def test_token_ids_only_where_asked(post):
    _, found = post("/v1/completions", prompt="a", max_tokens=2)
    assert found["choices"][0]["token_ids"] is None
    assert found["choices"][0]["prompt_token_ids"] is None


def test_token_ids_are_those_of_the_text(post):
    given = {"prompt": PROMPTS[0], "max_tokens": 6}
    _, found = post("/v1/completions", return_token_ids=True, **given)
    choice = found["choices"][0]
    assert choice["prompt_token_ids"] == post("/tokenize", prompt=PROMPTS[0])[1]["tokens"]
    assert len(choice["token_ids"]) == 6
    both = choice["prompt_token_ids"] + choice["token_ids"]
    _, text = post("/detokenize", tokens=both)
    assert text["prompt"].endswith(PROMPTS[0] + choice["text"])


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
def test_streamed_token_ids_join_to_the_whole(http, post, route):
    prompt = {"prompt": "Who?"} if route == "/v1/completions" else {"messages": HI}
    given = {**prompt, "max_tokens": 6, "return_token_ids": True}
    _, whole = post(route, **given)
    wanted = whole["choices"][0]
    wanted_prompt = wanted.get("prompt_token_ids") or whole.get("prompt_token_ids")
    prompts, ids = [], []
    body = {"model": "tiny", "temperature": 0, "stream": True, **given}
    with http.stream("POST", route, json=body) as answer:
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            for choice in chunk["choices"]:
                ids += choice.get("token_ids") or []
                found = choice.get("prompt_token_ids") or chunk.get("prompt_token_ids")
                prompts += [found] if found else []
    assert ids == wanted["token_ids"]
    assert prompts == [wanted_prompt]  # with the first chunk, and never again
