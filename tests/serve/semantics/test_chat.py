"""POST /v1/chat/completions: messages, tool choice, structured outputs, refusals."""

import json

import pytest

ROUTE = "/v1/chat/completions"
HI = [{"role": "user", "content": "Who lives in Peru?"}]
SCHEMA = {
    "type": "object",
    "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["age"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "find", "parameters": SCHEMA}}


def test_an_answer_has_the_form_of_the_api(post):
    _, found = post(ROUTE, messages=HI, max_tokens=4)
    assert found["object"] == "chat.completion"
    assert found["id"].startswith("chatcmpl-")
    [choice] = found["choices"]
    assert choice["message"]["role"] == "assistant"
    assert choice["finish_reason"] == "length"
    assert found["usage"]["completion_tokens"] == 4


def test_echo_puts_the_last_message_before_the_answer(post):
    partial = [*HI, {"role": "assistant", "content": "The people are"}]
    given = {"add_generation_prompt": False, "continue_final_message": True, "max_tokens": 4}
    plain = post(ROUTE, messages=partial, **given)[1]["choices"][0]["message"]["content"]
    _, found = post(ROUTE, messages=partial, echo=True, **given)
    assert found["choices"][0]["message"]["content"] == "The people are" + plain


def test_a_continued_message_has_no_new_header(post):
    partial = [*HI, {"role": "assistant", "content": "The people are"}]
    given = {"add_generation_prompt": False, "continue_final_message": True}
    _, tokens = post("/tokenize", messages=partial, **given)
    _, text = post("/detokenize", tokens=tokens["tokens"])
    assert text["prompt"].endswith("The people are")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "a"}, "messages"),
        ({"messages": [{"content": "a"}]}, "role"),
        ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message"),
        ({"n": 65}, "n"),
        ({"tool_choice": "required"}, "tool"),
        ({"tools": [TOOL], "tool_choice": "always"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "x"),
        ({"tools": [{"type": "function"}]}, "function"),
        ({"response_format": {"type": "json_schema"}}, "json_schema"),
        ({"response_format": {"type": "other"}}, "response_format"),
        ({"structured_outputs": {"json": {"type": "other"}}}, "other"),
        ({"structured_outputs": {"regex": "["}}, "regex"),
        ({"structured_outputs": {"choice": []}}, "choice"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "one"),
        ({"logit_bias": {"1000000": 1}}, "logit_bias"),
    ],
    ids=str,
)
def test_a_refusal_names_the_field(refused, given, said):
    assert said in refused(ROUTE, **{"messages": HI, **given})


def test_tool_choice_none_never_calls(post):
    _, found = post(ROUTE, messages=HI, tools=[TOOL], tool_choice="none", max_tokens=6)
    assert not found["choices"][0]["message"]["tool_calls"]
    assert found["choices"][0]["message"]["content"]


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "find"}}], ids=str
)
def test_a_forced_call_has_arguments_of_its_schema(post, choice):
    _, found = post(ROUTE, messages=HI, tools=[TOOL], tool_choice=choice, max_tokens=80,
                    parallel_tool_calls=False)  # fmt: skip
    [call] = found["choices"][0]["message"]["tool_calls"]
    assert found["choices"][0]["finish_reason"] == "tool_calls"
    assert call["function"]["name"] == "find"
    assert 0 <= json.loads(call["function"]["arguments"])["age"] <= 99


@pytest.mark.parametrize(
    "form",
    [
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": SCHEMA},
            }
        },
        {"structured_outputs": {"json": SCHEMA}},
        {"structured_outputs": {"json": json.dumps(SCHEMA)}},
    ],
    ids=["response_format", "structured_outputs", "text"],
)
def test_three_ways_to_one_schema_give_one_answer(post, form):
    _, found = post(ROUTE, messages=HI, max_tokens=40, **form)
    choice = found["choices"][0]
    assert choice["finish_reason"] == "stop", found
    assert set(json.loads(choice["message"]["content"])) == {"age"}
    plain = post(ROUTE, messages=HI, max_tokens=40, structured_outputs={"json": SCHEMA})[1]
    assert plain["choices"][0]["message"]["content"] == choice["message"]["content"]


def test_cached_tokens_are_reported(post):
    long = [{"role": "user", "content": "A question that comes twice. " * 6}]
    first = post(ROUTE, messages=long, max_tokens=1)[1]["usage"]
    again = post(ROUTE, messages=long, max_tokens=1)[1]["usage"]
    assert again["prompt_tokens"] == first["prompt_tokens"]
    assert 0 < again["prompt_tokens_details"]["cached_tokens"] < again["prompt_tokens"]
