"""POST /v1/chat/completions: messages, tool choice, structured outputs, refusals."""

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
