"""Token ids in answers, /tokenize and /detokenize: three views of the same tokens."""

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
