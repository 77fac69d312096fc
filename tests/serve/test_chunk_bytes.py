"""Streamed chunks, which are composed from text, have the bytes of their models."""

import json
from typing import Any

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rjax.serve.api.chat_parts import ChatDelta, delta_json
from rjax.serve.api.chunks import ChatChunks, CompletionChunks, UsageCounter
from rjax.serve.parsing.tools.parser import CallDelta
from rjax.serve.protocol.responses import (
    ChatCompletionResponseStreamChoice,
    ChatCompletionStreamResponse,
    ChatLogprobs,
    CompletionResponse,
    CompletionResponseChoice,
    DeltaFunctionCall,
    DeltaMessage,
    DeltaToolCall,
    UsageInfo,
)

from .live_server import live_server, make_engine
from .reasoning_model import write_reasoning_model

HEAD: dict[str, Any] = {"id": 'a-"1"', "created": 7, "model": "é\n\\"}
TEXTS = st.text(st.characters(exclude_categories=["Cs"]))
COUNT = UsageCounter()
COUNT.add(0, prompt_tokens=5, cached=2, generated=3)
ENTRY = {"token": "ü\x7f", "logprob": -1.5e-05, "bytes": [195, 188]}
LOGPROBS = {"content": [{**ENTRY, "top_logprobs": [ENTRY]}], "refusal": None}
NAMES = ("finish_reason", "stop_reason", "token_ids", "prompt_token_ids", "prompt_logprobs")


def data(event: str) -> str:
    assert event.startswith("data: ") and event.endswith("\n\n")
    return event[6:-2]


@given(TEXTS, st.integers(0, 300))
def test_a_text_is_that_of_the_model(text, index):
    model = CompletionResponse(**HEAD, choices=[CompletionResponseChoice(index=index, text=text)])
    expected = model.model_dump_json(exclude={"usage"})
    assert data(CompletionChunks(**HEAD).text(index, text)) == expected
    fields = model.choices[0].model_dump()
    assert data(CompletionChunks(**HEAD).choice(fields, None)) == expected
    assert data(CompletionChunks(**HEAD).choice(fields, None, large=True)) == expected
    model.usage = UsageInfo.model_validate(COUNT.usage())
    assert data(CompletionChunks(**HEAD).choice(fields, COUNT.usage())) == model.model_dump_json()


@given(TEXTS, TEXTS)
def test_each_chat_delta_is_that_of_the_model(text, name):
    call = DeltaToolCall(
        index=3,
        id=name,
        type="function",
        function=DeltaFunctionCall(name=name, arguments=text),
    )
    rest = DeltaToolCall(index=3, function=DeltaFunctionCall(arguments=text))
    reasoning = "." + text
    cases = [
        (ChatDelta(0, begins=True, content=text), DeltaMessage(role="assistant", content=text)),
        (ChatDelta(0, content=text), DeltaMessage(content=text)),
        (
            ChatDelta(0, reasoning=reasoning),
            DeltaMessage(reasoning=reasoning, reasoning_content=reasoning),
        ),
        (ChatDelta(0, call=CallDelta(3, text, name, name)), DeltaMessage(tool_calls=[call])),
        (ChatDelta(0, call=CallDelta(3, text)), DeltaMessage(tool_calls=[rest])),
        (ChatDelta(0, finish_reason="stop"), DeltaMessage()),
    ]
    for delta, model in cases:
        assert delta_json(delta) == model.model_dump_json(exclude_unset=True)


@pytest.mark.parametrize("reason", [None, "tool_calls"])
@pytest.mark.parametrize("more", range(16))
def test_a_chat_chunk_is_that_of_the_model(reason, more):
    options: dict[str, Any] = {}
    model = ChatCompletionStreamResponse(**HEAD, object="chat.completion.chunk", choices=[])
    choice = ChatCompletionResponseStreamChoice(
        index=4, delta=DeltaMessage(content="a"), logprobs=None, finish_reason=reason
    )
    if more & 1:
        options["logprobs"] = LOGPROBS
        choice.logprobs = ChatLogprobs.model_validate(LOGPROBS)
    if more & 2:
        options["stop_reason"] = choice.stop_reason = "é"
    if more & 4:
        options["token_ids"] = choice.token_ids = [1, 22]
    if more & 8:
        options["usage"] = COUNT.usage(reasoning=1)
        model.usage = UsageInfo.model_validate(options["usage"])
        options["prompt_token_ids"] = model.prompt_token_ids = [3]
    model.choices = [choice]
    chunk = ChatChunks(**HEAD).choice(
        4, '{"content":"a"}', finish_reason=json.dumps(reason), **options
    )
    assert data(chunk) == model.model_dump_json(exclude_unset=True)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 9), st.integers(0, 9)), max_size=9))
def test_usage_counts_each_prompt_once(outputs):
    count, prompts = UsageCounter(), {}
    for index, tokens, generated in outputs:
        count.add(index, tokens, tokens // 2, generated)
        prompts[index] = tokens
    found = UsageInfo.model_validate(count.usage(reasoning=4))
    assert found.prompt_tokens == sum(prompts.values())
    assert found.completion_tokens == sum(generated for _, _, generated in outputs)
    assert found.total_tokens == found.prompt_tokens + found.completion_tokens
    assert found.prompt_tokens_details.cached_tokens == sum(n // 2 for n in prompts.values())
    assert found.completion_tokens_details.reasoning_tokens == 4


@pytest.fixture(scope="module")
def reasons(tmp_path_factory):
    folder = write_reasoning_model(tmp_path_factory.mktemp("chunks") / "tiny", special=False)
    with live_server(make_engine(folder, max_num_seqs=4), reasoning_parser="qwen3") as found:
        yield found


USAGE = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
AGE = {"type": "object", "properties": {"age": {"type": "integer", "maximum": 9}},
       "required": ["age"]}  # fmt: skip
TOOL = {"type": "function", "function": {"name": "ask", "parameters": AGE}}
SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "usage": USAGE,
    "samples": {"n": 3, "temperature": 1, "seed": 3},
    "ids": {"return_token_ids": True},
    "stop": {"stop": ["e", "a"]},
    "names": {"return_tokens_as_token_ids": True, **USAGE},
}
OF_ROUTE: dict[str, dict[str, dict[str, Any]]] = {
    "completions": {
        "logprobs": {"logprobs": 3},
        "echo": {"echo": True, "logprobs": 2},
        "scores": {"echo": True, "max_tokens": 0, "logprobs": 1},
        "prompts": {"prompt": ["Who", "Peru is"], "n": 2, "temperature": 1, "prompt_logprobs": 1},
    },
    "chat/completions": {
        "logprobs": {"logprobs": True, "top_logprobs": 3, **USAGE},
        "calls": {"tools": [TOOL], "tool_choice": "required", "max_tokens": 60},
        "echo": {"echo": True, "messages": [{"role": "assistant", "content": "Hé"}],
                 "add_generation_prompt": False, "continue_final_message": True},
    },
}  # fmt: skip


@pytest.mark.sample(6, 4)
@pytest.mark.parametrize(
    ("route", "shape"),
    [(route, {**SHAPES, **more}[name]) for route, more in OF_ROUTE.items()
     for name in {**SHAPES, **more}],
    ids=[f"{route}-{name}" for route, more in OF_ROUTE.items() for name in {**SHAPES, **more}],
)  # fmt: skip
def test_every_chunk_of_a_stream_is_that_of_its_model(reasons, route, shape):
    prompt = {"prompt": "Who lives in Peru?"} if route == "completions" else {
        "messages": [{"role": "user", "content": "Who lives in Peru?"}]
    }  # fmt: skip
    body = {"temperature": 0, "max_tokens": 9, "stream": True, **prompt, **shape}
    answer = httpx2.post(f"{reasons.url}/v1/{route}", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    *events, last, end = answer.text.split("\n\n")
    assert (last, end) == ("data: [DONE]", "")
    assert len(events) > (shape.get("max_tokens") != 0)
    kind = CompletionResponse if route == "completions" else ChatCompletionStreamResponse
    for event in events:
        text = data(event + "\n\n")
        made = kind.model_validate_json(text, extra="forbid")
        if shape.get("echo") or shape.get("prompt_logprobs"):  # large: other forms of a float
            assert made.model_dump(exclude_unset=True) == json.loads(text)
        else:
            assert made.model_dump_json(exclude_unset=True) == text
        choices = made.choices
        if route == "completions" and choices:
            assert {*NAMES, "index", "text", "logprobs"} == choices[0].model_fields_set
