"""The official client drives every feature: sync, async, streaming."""

import asyncio
import json
import math

import openai
import pytest

from .live_server import LiveServer

HI = [{"role": "user", "content": "Who lives in Peru?"}]
GREEDY = {"model": "tiny", "temperature": 0}


def text_of(stream) -> str:
    return "".join(c.choices[0].delta.content or "" for c in stream if c.choices)


def test_models(client):
    assert [m.id for m in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").max_model_len == 512
    with pytest.raises(openai.NotFoundError, match="tiny"):
        client.models.retrieve("other")


def test_chat_stream_is_the_answer_in_pieces(client):
    whole = client.chat.completions.create(messages=HI, max_tokens=12, **GREEDY)
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage.completion_tokens == 12
    assert whole.usage.total_tokens == 12 + whole.usage.prompt_tokens
    chunks = list(
        client.chat.completions.create(
            messages=HI,
            max_completion_tokens=12,
            stream=True,
            stream_options={"include_usage": True},
            **GREEDY,
        )
    )
    assert text_of(chunks) == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert all(c.usage is None for c in chunks[:-1])
    assert chunks[-1].usage.completion_tokens == 12
    assert len({c.id for c in chunks}) == 1


def test_best_of_gives_back_the_likeliest(client):
    args = {"model": "tiny", "prompt": ["Who?", "Where?"], "max_tokens": 6, "seed": 3}
    every = client.completions.create(n=5, logprobs=0, **args).choices
    for count, stream in ((2, False), (5, False), (5, True)):
        made = client.completions.create(n=count, best_of=5, stream=stream, **args)
        texts = dict.fromkeys(range(2 * count), "")
        for answer in made if stream else [made]:
            for choice in answer.choices:
                texts[choice.index] += choice.text
        for i in range(2):
            chances = {c.text: sum(c.logprobs.token_logprobs) for c in every[5 * i : 5 * i + 5]}
            best = sorted(chances, key=chances.__getitem__, reverse=True)[:count]
            found = [texts[count * i + j] for j in range(count)]
            assert found == best if count < 5 else set(found) == set(best)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"best_of": 3, "stream": True}, "do not stream"),
        ({"best_of": 2, "n": 3}, "not below n"),
        ({"best_of": 2, "temperature": 0}, "greedy"),
        ({"best_of": 40, "prompt": ["a"] * 7}, "280 sequences; at most 256"),
    ],
)
def test_best_of_that_cannot_be(client, more, message):
    with pytest.raises(openai.BadRequestError, match=message) as caught:
        client.completions.create(**{"model": "tiny", "prompt": "a", **more})
    assert caught.value.param == "best_of"


def test_same_seed_same_text(client):
    def ask(seed: int) -> str:
        args = {"model": "tiny", "messages": HI, "max_tokens": 16, "temperature": 1, "seed": seed}
        return client.chat.completions.create(**args).choices[0].message.content

    assert ask(1) == ask(1)
    assert ask(1) != ask(2)


def test_async_client_runs_many_at_once(server: LiveServer):
    async def whole() -> list[str]:
        base = f"{server.url}/v1"
        async with openai.AsyncOpenAI(base_url=base, api_key="none", max_retries=0) as client:

            async def one(i: int) -> str:
                stream = await client.chat.completions.create(
                    messages=[{"role": "user", "content": f"question {i % 3}"}],
                    max_tokens=10,
                    stream=True,
                    **GREEDY,
                )
                return "".join([c.choices[0].delta.content or "" async for c in stream])

            return await asyncio.gather(*(one(i) for i in range(12)))

    found = asyncio.run(whole())
    assert all(found[i] == found[i % 3] for i in range(12))


def test_shared_system_message_is_found_by_itself(client):
    system = {"role": "system", "content": "You know a table of people. " * 8}
    counts = []
    for question in ("Who?", "Where?", "When?"):
        messages = [system, {"role": "user", "content": question}]
        usage = client.chat.completions.create(messages=messages, max_tokens=2, **GREEDY).usage
        counts.append(usage.prompt_tokens_details.cached_tokens)
        assert usage.prompt_tokens > 16
    assert min(counts[1:]) >= 16
    assert counts[0] < counts[1]


def test_chat_logprobs(client):
    found = client.chat.completions.create(
        messages=HI, max_tokens=4, logprobs=True, top_logprobs=3, **GREEDY
    )
    content = found.choices[0].logprobs.content
    assert len(content) == 4
    for token in content:
        assert len(token.top_logprobs) == 3
        values = [t.logprob for t in token.top_logprobs]
        assert values == sorted(values, reverse=True)
        assert token.logprob == values[0]  # greedy
        assert token.bytes is not None
        assert bytes(token.bytes).decode(errors="replace") == token.token
    chunks = client.chat.completions.create(
        messages=HI, max_tokens=4, logprobs=True, top_logprobs=3, stream=True, **GREEDY
    )
    streamed = [
        t.logprob
        for c in chunks
        if c.choices and c.choices[0].logprobs
        for t in c.choices[0].logprobs.content
    ]
    assert streamed == [t.logprob for t in content]


def test_completion_logprobs_and_echo_score_a_prompt(client):
    prompt = "Who lives in Peru?"
    args = {"prompt": prompt, "echo": True, "logprobs": 2, **GREEDY}
    scored = client.completions.create(max_tokens=0, **args)
    longer = client.completions.create(max_tokens=3, **args)
    assert scored.choices[0].text == prompt
    assert longer.choices[0].text.startswith(prompt)
    assert scored.usage.completion_tokens == 0
    one, more = scored.choices[0].logprobs, longer.choices[0].logprobs
    assert len(more.tokens) == len(one.tokens) + 3 == scored.usage.prompt_tokens + 3
    assert more.token_logprobs[: len(one.tokens)] == one.token_logprobs
    assert one.token_logprobs[0] is None
    assert all(math.isfinite(x) and x < 0 for x in one.token_logprobs[1:])
    assert "".join(one.tokens[1:]) == prompt


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_and_stop_reason(client, stream):
    whole = client.completions.create(prompt="a", max_tokens=12, **GREEDY).choices[0].text
    stop = whole[5:8]
    args = {"prompt": "a", "max_tokens": 12, "stop": [stop], **GREEDY}
    if stream:
        chunks = list(client.completions.create(stream=True, **args))
        text = "".join(c.choices[0].text for c in chunks)
        last = chunks[-1].choices[0]
    else:
        last = client.completions.create(**args).choices[0]
        text = last.text
    assert text == whole[: whole.index(stop)]
    assert last.finish_reason == "stop"
    assert last.stop_reason == stop
    kept = client.completions.create(extra_body={"include_stop_str_in_output": True}, **args)
    assert kept.choices[0].text == whole[: whole.index(stop)] + stop


def test_penalties_and_bias_act(client):
    args = {"prompt": "a", "max_tokens": 8, **GREEDY}
    plain = client.completions.create(**args).choices[0].text
    biased = client.completions.create(logit_bias={"77": 100}, **args).choices[0].text
    penalised = client.completions.create(
        logit_bias={"77": 9}, frequency_penalty=2, presence_penalty=2, **args
    )
    assert biased != plain
    assert biased == biased[: len(biased) // 8] * 8
    assert penalised.choices[0].text != biased


def test_extensions(client, server: LiveServer):
    extra = {
        "top_k": 1,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "stop_token_ids": [9],
        "ignore_eos": True,
        "min_tokens": 6,
        "allowed_token_ids": list(range(40, 80)),
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "return_token_ids": True,
        "prompt_logprobs": 1,
        "priority": 3,
        "cache_salt": "tea",
    }
    found = client.completions.create(
        model="tiny", prompt=[5, 6, 7], max_tokens=6, temperature=0.7, seed=1, extra_body=extra
    ).choices[0]
    assert found.prompt_token_ids == [5, 6, 7]
    assert len(found.token_ids) == 6
    assert set(found.token_ids) <= set(range(40, 80))
    assert found.prompt_logprobs[0] is None
    assert len(found.prompt_logprobs) == 3


def test_minimum_tokens_and_cache_salt_keep_apart(client):
    def cached(salt: str) -> int:
        found = client.completions.create(
            prompt="A long beginning that is shared. " * 6,
            max_tokens=1,
            extra_body={"cache_salt": salt},
            **GREEDY,
        )
        return found.usage.prompt_tokens_details.cached_tokens

    assert cached("one") == 0
    assert cached("one") >= 16
    assert cached("two") == 0


def test_parsed_answers(client):
    import pydantic

    class Person(pydantic.BaseModel):
        age: int
        ok: bool

    found = client.chat.completions.parse(
        model="tiny", messages=HI, max_tokens=100, response_format=Person, temperature=0
    )
    assert isinstance(found.choices[0].message.parsed, Person)


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "finds people",
            "parameters": {
                "type": "object",
                "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 99}},
                "required": ["age"],
                "additionalProperties": False,
            },
        },
    }
    for name in ("find", "count")
]
NAMED = {"type": "function", "function": {"name": "count"}}


@pytest.mark.parametrize(("choice", "stream"), [("required", False), (NAMED, True)], ids=str)
def test_forced_tool_call_and_its_result(client, choice, stream):
    args = {
        "model": "tiny",
        "messages": HI,
        "tools": TOOLS,
        "tool_choice": choice,
        "max_tokens": 80,
        "temperature": 1,
        "seed": 2,
        "parallel_tool_calls": False,
    }
    if stream:
        with client.chat.completions.stream(**args) as events:
            message = events.get_final_completion().choices[0].message
    else:
        found = client.chat.completions.create(**args).choices[0]
        assert found.finish_reason == "tool_calls"
        message = found.message
    [call] = message.tool_calls
    assert call.function.name in (["count"] if choice is NAMED else ["find", "count"])
    assert 0 <= json.loads(call.function.arguments)["age"] <= 99
    answer = [
        *HI,
        message.model_dump(exclude={"parsed"}) if not stream else {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": call.id, "type": "function",
                 "function": {"name": call.function.name, "arguments": call.function.arguments}}
            ],
        },
        {"role": "tool", "tool_call_id": call.id, "content": "7"},
    ]  # fmt: skip
    final = client.chat.completions.create(messages=answer, tools=TOOLS, max_tokens=4, **GREEDY)
    assert final.choices[0].message.content


def test_errors_are_the_clients_own_kinds(client):
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other", messages=HI)
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="tiny", messages=HI, temperature=9)
    assert caught.value.param == "temperature"
    assert caught.value.code == "invalid_request_error"
    image = {"type": "image_url", "image_url": {"url": "http://example.com/a.png"}}
    with pytest.raises(openai.BadRequestError, match="image_url"):
        client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": [image]}]
        )


def test_text_parts_and_developer_messages(client):
    parts = [{"type": "text", "text": "Who lives "}, {"type": "text", "text": "in Peru?"}]
    messages = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": parts}]
    plain = [{"role": "system", "content": "be brief"}, *HI]
    one, two = (
        client.chat.completions.create(messages=m, max_tokens=4, **GREEDY)
        for m in (messages, plain)
    )
    assert one.choices[0].message.content == two.choices[0].message.content
