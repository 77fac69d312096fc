"""A prompt that is too long: OpenAI's code, wording and the right number on every route."""

import pytest

LENGTH = 512  # max_model_len of the server
IDS = [77] * (LENGTH + 8)
TEXT = "Who lives in Peru? " * LENGTH
MESSAGES = [{"role": "user", "content": TEXT}]
HUGE = "x" * 200 * LENGTH  # refused by its characters, before it is tokenised


@pytest.fixture
def too_long(post):
    """The error of a body that must be refused for its length."""

    def send(route: str, **body: object) -> dict:
        status, answer = post(route, **body)
        assert status == 400, answer
        error = answer["error"]
        assert error["code"] == "context_length_exceeded", error
        # litellm looks for these words, langchain for the code.
        said = f"This model's maximum context length is {LENGTH} tokens"
        assert error["message"].startswith(said), error
        return error

    return send


@pytest.mark.parametrize(
    ("route", "param", "body"),
    [
        ("/v1/completions", "prompt", {"prompt": IDS}),
        ("/v1/completions", "prompt", {"prompt": TEXT}),
        ("/v1/completions", "prompt", {"prompt": HUGE}),
        ("/v1/completions", "prompt", {"prompt": ["a", TEXT]}),
        ("/v1/completions", "prompt", {"prompt": TEXT, "stream": True}),
        ("/v1/completions", "prompt", {"prompt": TEXT, "truncate_prompt_tokens": LENGTH}),
        ("/v1/chat/completions", "messages", {"messages": MESSAGES}),
        ("/v1/chat/completions", "messages", {"messages": MESSAGES, "stream": True}),
        ("/v1/chat/completions", "messages", {"messages": [{"role": "user", "content": HUGE}]}),
        ("/v1/responses", "input", {"input": TEXT}),
        ("/v1/responses", "input", {"input": HUGE}),
        ("/v1/prefixes", "prompt", {"name": "long", "prompt": IDS}),
        ("/v1/prefixes", "prompt", {"name": "long", "prompt": TEXT}),
        ("/v1/prefixes", "messages", {"name": "long", "messages": MESSAGES}),
    ],
)
def test_a_prompt_that_is_too_long(too_long, route, param, body):
    if "name" in body:  # a prefix has neither model nor sampling
        body = body | {"model": None, "temperature": None}
    assert too_long(route, **body)["param"] == param


def test_the_longest_prompt_has_one_token_less(post, too_long):
    """The number in the message is that of the longest prompt that runs."""
    for form in ([77] * LENGTH, post("/detokenize", tokens=[77] * LENGTH)[1]["prompt"]):
        given = {"prompt": form, "add_special_tokens": False}
        assert (
            f"has {LENGTH} tokens; at most {LENGTH - 1} fit"
            in too_long("/v1/completions", **given)["message"]
        )
    status, found = post("/v1/completions", prompt=[77] * (LENGTH - 1), max_tokens=4)
    assert status == 200
    assert found["usage"]["prompt_tokens"] == LENGTH - 1


def test_a_prefix_counts(http, post, too_long):
    prefix = {"name": "half", "prompt": [77] * (LENGTH // 2), "pin": False}
    assert post("/v1/prefixes", **prefix, model=None, temperature=None)[0] == 200
    try:
        error = too_long("/v1/completions", prefix="half", prompt=[77] * (LENGTH // 2))
        assert f"has {LENGTH} tokens" in error["message"]
    finally:
        http.delete("/v1/prefixes/half")


def test_counting_tokens_is_no_prompt(post):
    """/tokenize counts texts that no prompt could hold."""
    status, found = post("/tokenize", prompt="a " * LENGTH)
    assert status == 200
    assert found["count"] > LENGTH
