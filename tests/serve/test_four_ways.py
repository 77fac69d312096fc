"""Every feature through the official client, sync and async, whole and streamed: one answer."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import openai
import pytest

from .live_server import LiveServer

HI = [{"role": "user", "content": "Who lives in Peru?"}]
SCHEMA = {
    "type": "object",
    "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["age"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "find", "parameters": SCHEMA}}
NAMED = {"type": "function", "function": {"name": "find"}}
RESPONSE = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
CHATS: list[dict[str, Any]] = [
    {},
    {"n": 3},
    {"max_completion_tokens": 5},
    {"logprobs": True},
    {"logprobs": True, "top_logprobs": 4, "n": 2},
    {"stop": ["a", "e"]},
    {"presence_penalty": 1.5, "frequency_penalty": -1},
    {"logit_bias": {"60": 8, "61": -100}},
    {"top_p": 0.7},
    {"response_format": {"type": "json_object"}},
    {"response_format": RESPONSE, "n": 2},
    {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False, "n": 2},
    {"tools": [TOOL], "tool_choice": NAMED},
    {"tools": [TOOL], "tool_choice": "auto"},
    {"tools": [TOOL], "tool_choice": "none"},
    {"extra_body": {"structured_outputs": {"choice": ["red", "blue"]}}},
    {"extra_body": {"structured_outputs": {"regex": "[a-f]{9}"}}, "logprobs": True},
    {"extra_body": {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.3, "min_tokens": 4}},
    {"extra_body": {"ignore_eos": True, "return_token_ids": True, "priority": 2}},
]
COMPLETIONS: list[dict[str, Any]] = [
    {},
    {"n": 2, "prompt": ["a", "b"]},
    {"prompt": [5, 6, 7]},
    {"prompt": [[5, 6], [7]], "max_tokens": 3},
    {"echo": True},
    {"echo": True, "logprobs": 2},
    {"echo": True, "logprobs": 1, "max_tokens": 0},
    {"logprobs": 3, "n": 2},
    {"stop": "a"},
    {"stop": ["a"], "extra_body": {"include_stop_str_in_output": True}},
    {"presence_penalty": 1, "frequency_penalty": 1, "logit_bias": {"60": 5}},
    {"extra_body": {"structured_outputs": {"json": SCHEMA}}},
    {"extra_body": {"structured_outputs": {"grammar": 'start: "a" ("b" | "c")+ "d"'}}},
    {"extra_body": {"structured_outputs": {"json_object": True}}},
    {"extra_body": {"prompt_logprobs": 1, "skip_special_tokens": False}},
    {"extra_body": {"bad_words": ["a", "b", "c"]}, "logprobs": 1, "n": 2},
    {"extra_body": {"allowed_token_ids": [60, 61, 62], "stop_token_ids": [62]}},
]


class Merged:
    """What a whole answer says, or the chunks of a stream together."""

    def __init__(self) -> None:
        self.choices: dict[int, dict[str, Any]] = {}
        self.usage: Any = None

    def add(self, answer: Any) -> "Merged":
        if answer.usage is not None:
            self.usage = answer.usage.model_dump()
        for choice in answer.choices:
            found = self.choices.setdefault(
                choice.index,
                {"text": "", "logprobs": [], "tools": {}, "reason": None, "stop": None},
            )
            said = getattr(choice, "message", None) or getattr(choice, "delta", None)
            found["text"] += (choice.text if said is None else said.content) or ""
            for i, call in enumerate((said and said.tool_calls) or ()):
                parts = found["tools"].setdefault(getattr(call, "index", i), ["", ""])
                parts[0] += call.function.name or ""
                parts[1] += call.function.arguments or ""
            if choice.logprobs is not None:
                given = choice.logprobs
                tokens = given.token_logprobs if said is None else given.content
                dumped = tokens if said is None else [t.model_dump() for t in tokens]
                found["logprobs"] += rounded(dumped)
            found["reason"] = choice.finish_reason or found["reason"]
            found["stop"] = getattr(choice, "stop_reason", None) or found["stop"]
        return self

    @property
    def value(self) -> Any:
        usage = dict(self.usage)
        usage.pop("prompt_tokens_details")  # the second to ask finds the prompt in the cache
        return dict(sorted(self.choices.items())), usage


def rounded(value: Any) -> Any:
    """Step sizes differ from one asking to the next, and the last bits of logprobs with them."""
    match value:
        case float():
            return round(value, 3)
        case list():
            return [rounded(item) for item in value]
        case dict():
            return {name: rounded(item) for name, item in value.items()}
    return value


def merged(answer: Any) -> Any:
    found = Merged()
    for part in answer if isinstance(answer, Iterator) else [answer]:
        found.add(part)
    return found.value


async def merged_later(answer: Any) -> Any:
    answer = await answer
    if not isinstance(answer, AsyncIterator):
        return Merged().add(answer).value
    found = Merged()
    async for part in answer:
        found.add(part)
    return found.value


@pytest.mark.sample(6, 10)
@pytest.mark.parametrize(
    ("route", "args"),
    [*(("chat", args) for args in CHATS), *(("completions", args) for args in COMPLETIONS)],
    ids=lambda value: str(value)[:50],
)
def test_four_ways_to_one_answer(server: LiveServer, client: openai.OpenAI, route, args):
    base: dict[str, Any] = {"model": "tiny", "seed": 5, "temperature": 0.8, "max_tokens": 16}
    base |= {"messages": HI} if route == "chat" else {"prompt": "Who?"}
    whole = {**base, **args}
    if "max_completion_tokens" in args:
        del whole["max_tokens"]
    streamed = {**whole, "stream": True, "stream_options": {"include_usage": True}}

    def create(of: Any, given: dict[str, Any]) -> Any:
        return (of.chat.completions if route == "chat" else of.completions).create(**given)

    async def later() -> list[Any]:
        url = f"{server.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as of:
            both = merged_later(create(of, whole)), merged_later(create(of, streamed))
            return [*await asyncio.gather(*both)]

    want = merged(create(client, whole))
    assert merged(create(client, streamed)) == want
    assert asyncio.run(later()) == [want, want]
    choices, usage = want
    assert all(choice["reason"] in ("stop", "length", "tool_calls") for choice in choices.values())
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
