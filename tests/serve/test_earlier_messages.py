"""What chat templates see of the conversation that a client sends."""

import json
from typing import Any

import pytest

from rjax.serve.api.responses.conversion import input_messages
from rjax.serve.parsing.tools.prompt import conversation
from rjax.serve.protocol.requests import ChatCompletionRequest, Message
from rjax.serve.protocol.responses_api_requests import ResponsesRequest
from rjax.tokenization import Tokenizer

from .live_server import TOKENIZER
from .tool_formats import TOOL_FORMATS

# As templates of checkpoints do: it adds the content to a string and iterates the arguments.
STRICT = (
    "{%- for message in messages -%}"
    "{{- '[' + message.role + '] ' + message.content -}}"
    "{%- for call in message.tool_calls or () -%}"
    "{{- ' (' + call.function.name -}}"
    "{%- for name, value in call.function.arguments.items() -%}"
    "{{- ' ' + name + '=' + value | string -}}{%- endfor -%}{{- ')' -}}"
    "{%- endfor -%}{%- endfor -%}"
    "{#- tools -#}"
)
NESTED: dict[str, Any] = {"a": {"b": [1, "x"]}}


def rendered(messages: list[Message]) -> str:
    tokenizer = Tokenizer(TOKENIZER, chat_template=STRICT)
    found = conversation(messages, [], tokenizer, TOOL_FORMATS["hermes"])
    return tokenizer.apply_chat_template(found, add_generation_prompt=False)


def chat(*messages: dict[str, Any]) -> list[Message]:
    return ChatCompletionRequest.model_validate({"messages": list(messages)}).messages


def call(**function: Any) -> dict[str, Any]:
    return {"id": "1", "type": "function", "function": {"name": "f", **function}}


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ({}, ""),
        ({"arguments": None}, ""),
        ({"arguments": ""}, ""),
        ({"arguments": " \n"}, ""),
        ({"arguments": "null"}, ""),
        ({"arguments": "{}"}, ""),
        ({"arguments": {}}, ""),
        ({"arguments": '{"a": 1}'}, " a=1"),
        ({"arguments": {"a": 1}}, " a=1"),
        ({"arguments": json.dumps('{"a": 1}')}, " a=1"),
        ({"arguments": json.dumps('"x"')}, None),
        ({"arguments": '{"a": "{\\"b\\": 1}"}'}, ' a={"b": 1}'),
        ({"arguments": NESTED}, " a={'b': [1, 'x']}"),
    ],
)
def test_arguments_of_an_earlier_call_are_parsed_once(given, shown):
    messages = chat(
        {"role": "assistant", "tool_calls": [call(**given)]},
        {"role": "tool", "tool_call_id": "1", "content": "r"},
    )
    item = {"type": "function_call", "call_id": "1", "name": "f", **given}
    of_items = input_messages(ResponsesRequest.model_validate({"input": [item]}).input)
    if shown is None:  # a text in a text: the template refuses it
        with pytest.raises(Exception, match="the chat template refused"):
            rendered(messages)
        return
    assert rendered(messages) == f"[assistant]  (f{shown})[tool] r"
    assert rendered(of_items) == f"[assistant]  (f{shown})"


def test_calls_without_a_template_for_them_stay_as_the_model_wrote_them():
    tokenizer = Tokenizer(TOKENIZER, chat_template=STRICT.replace("{#- tools -#}", ""))
    messages = chat(
        {"role": "assistant", "tool_calls": [call(arguments=""), call(arguments='{"a":1}')]}
    )
    (found,) = conversation(messages, [], tokenizer, TOOL_FORMATS["hermes"])
    assert '"arguments": {}}' in found["content"]
    assert '"arguments": {"a":1}}' in found["content"]


def test_python_callers_may_send_answers_back_too():
    tokenizer = Tokenizer(TOKENIZER, chat_template=STRICT)
    messages: list[Any] = [
        {"role": "assistant", "content": None, "tool_calls": [call(arguments='{"a": 1}'), call()]},
        {"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]},
    ]
    kept = json.dumps(messages)
    found = tokenizer.apply_chat_template(messages, add_generation_prompt=False)
    assert found == "[assistant]  (f a=1) (f)[user] x\ny"
    assert json.dumps(messages) == kept  # not written to


def test_text_parts_are_lines_of_one_message():
    parts = [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]
    assert rendered(chat({"role": "user", "content": parts})) == "[user] x\ny"
    assert rendered(chat({"role": "user", "content": parts[:1]})) == "[user] x"
    assert rendered(chat({"role": "user", "content": []})) == "[user] "
    inputs = [{"type": "input_text", "text": "x"}, {"type": "input_text", "text": "y"}]
    outputs = [{"type": "output_text", "text": "p"}, {"type": "refusal", "refusal": "q"}]
    body = ResponsesRequest.model_validate(
        {
            "input": [
                {"role": "user", "content": inputs},
                {"type": "message", "role": "assistant", "content": outputs},
                {"type": "function_call_output", "call_id": "1", "output": inputs},
            ]
        }
    )
    assert rendered(input_messages(body.input)) == "[user] x\ny[assistant] p\nq[tool] x\ny"
