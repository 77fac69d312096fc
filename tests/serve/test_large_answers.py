"""Answers of tens of megabytes are made a piece at a time: the event loop never stops for 0.2 s."""

import asyncio
import functools
import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx2
import pytest

from rjax.outputs import CompletionOutput, FlatLogprobs, Logprob, RequestOutput
from rjax.sampling import SamplingParams
from rjax.serve.api.chat_parts import ChatParts
from rjax.serve.api.completions import CompletionEncoder, ResponseBuilder
from rjax.serve.config.limits import ServeLimits
from rjax.serve.http.chunked_json import chunked_response, iter_json, response_size
from rjax.serve.protocol.errors import ApiError
from rjax.serve.protocol.logprobs import within_logprobs_limit
from rjax.serve.protocol.requests import ChatCompletionRequest, CompletionRequest
from rjax.serve.protocol.responses import (
    ChatCompletionResponseChoice,
    ChatMessage,
    CompletionResponse,
    TokenizeResponse,
)

from .live_server import LENGTH, LiveServer
from .watch import LongestPause, best_of_two

TOKENS, ALTERNATIVES = 500, 21
MOST = ServeLimits().request_logprobs // TOKENS // ALTERNATIVES


def output(samples: int) -> RequestOutput:
    """A prompt with the logprobs of its tokens, sampled so many times."""
    entry = {i: Logprob(-1.5 * i, i + 1, f"é{i}") for i in range(ALTERNATIVES)}
    return RequestOutput(
        request_id="a",
        prompt="b",
        prompt_token_ids=[1] * TOKENS,
        prompt_logprobs=[None, *[entry] * (TOKENS - 1)],
        outputs=[CompletionOutput(i, "c", [1], finish_reason="length") for i in range(samples)],
        finished=True,
    )


def paused(work: Callable[[], Awaitable[Any]]) -> tuple[float, Any]:
    """Seconds of the event loop's longest pause during some work, and its result."""

    async def run() -> tuple[float, Any]:
        pause, working = LongestPause(), asyncio.ensure_future(work())
        await pause.run(working.done)
        return pause.seconds, working.result()

    return asyncio.run(run())


async def whole(server: LiveServer, samples: int) -> list[bytes]:
    """The pieces of an answer as they are sent."""
    body = CompletionRequest(prompt="b", prompt_logprobs=20)
    builder = ResponseBuilder(body, server.service, SamplingParams(n=samples))
    found = output(samples)
    size = response_size([found], SamplingParams(prompt_logprobs=20))
    threads = server.service.response_threads
    response = await chunked_response(lambda: builder.whole([found]), size, threads)
    sent: list[bytes] = []

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))

    await response({}, None, send)  # type: ignore[arg-type]
    assert int(response.headers["content-length"]) == sum(map(len, sent))
    return sent


async def chat(server: LiveServer, samples: int) -> list[bytes]:
    """The pieces of a chat's answer, with the logprobs of the generated tokens."""
    body = ChatCompletionRequest(
        messages=[{"role": "user", "content": "b"}], logprobs=True, top_logprobs=20
    )
    params = SamplingParams(logprobs=20)
    parts = ChatParts(body, server.service, params, [], [1], "", answer_logprobs=False)
    length = samples * TOKENS
    flat = FlatLogprobs(
        server.service.tokenizer.token_text,
        [ALTERNATIVES * (i + 1) for i in range(length)],
        [*range(5, 5 + ALTERNATIVES)] * length,
        [-1.5 * i for i in range(ALTERNATIVES)] * length,
        [*range(1, 1 + ALTERNATIVES)] * length,
    )
    answer = CompletionOutput(0, "c", [5] * length, logprobs=flat, finish_reason="length")
    found = RequestOutput("a", "b", [1], None, [answer], finished=True)
    response = await chunked_response(
        lambda: parts.whole(found), response_size([found], params), server.service.response_threads
    )
    return response._pieces


async def events(server: LiveServer, samples: int) -> list[str]:
    body = CompletionRequest(prompt="b", prompt_logprobs=20, stream=True)
    encoder = CompletionEncoder(body, server.service, SamplingParams(n=samples))
    found = output(samples)
    assert encoder.is_large(0, found, last=True)
    encode = functools.partial(encoder.encode, 0, found, last=True)
    events = await server.service.response_threads.run(encode)
    assert not encoder.is_large(0, found, last=True)
    return events


@pytest.mark.sample(1, 1)
@pytest.mark.parametrize("form", [whole, chat, events])
def test_large_answers_do_not_stop_the_loop(server: LiveServer, form: Callable[..., Any]):
    def measure() -> float:
        pause, found = paused(lambda: form(server, MOST))
        assert sum(map(len, found)) > 20e6
        assert len(found) > MOST
        assert max(map(len, found)) < 2e6
        return pause

    best_of_two(measure, 0.2)


def test_pieces_make_the_same_json(server: LiveServer):
    body = CompletionRequest(prompt="b", prompt_logprobs=20)
    builder = ResponseBuilder(body, server.service, SamplingParams(n=2))
    answer = json.loads("".join(iter_json(builder.whole([output(2)]))))
    made = CompletionResponse.model_validate(answer, strict=True)
    assert answer == made.model_dump()
    assert json.loads("".join(iter_json(made))) == answer
    assert json.loads("".join(iter_json(answer))) == answer
    empty = TokenizeResponse(tokens=[], count=0, max_model_len=1)
    assert json.loads("".join(iter_json(empty))) == empty.model_dump()
    long = TokenizeResponse(tokens=list(range(1000)), count=0, max_model_len=1)
    assert json.loads("".join(iter_json(long))) == long.model_dump()
    choice = ChatCompletionResponseChoice(
        index=0, message=ChatMessage(content='"é\n'), finish_reason="stop"
    )
    assert json.loads("".join(iter_json(choice))) == choice.model_dump()


@pytest.mark.parametrize(
    "more",
    [
        {"prompt_logprobs": 20, "prompt": [[12] * 500] * 60},
        {"prompt_logprobs": 20, "n": 60, "prompt": [12] * 500},
        {"logprobs": 20, "n": 64, "max_tokens": 500},
        {"echo": True, "logprobs": 20, "prompt": [[12] * 500] * 60},
    ],
)
def test_too_many_logprobs_are_refused(server: LiveServer, more: dict):
    body = {"prompt": "a", "max_tokens": 1, **more}
    answer = httpx2.post(server.url + "/v1/completions", json=body, timeout=60)
    assert answer.status_code == 400
    assert "logprobs are asked for" in answer.json()["error"]["message"]


def test_logprobs_within_the_length_are_allowed():
    """Without ``max_tokens`` the model's length bounds them, and is few enough here."""
    params = SamplingParams(max_tokens=None, logprobs=20, prompt_logprobs=20)
    most = LENGTH * ALTERNATIVES
    within_logprobs_limit(params, [100], LENGTH, most)
    with pytest.raises(ApiError, match=f"up to {most} logprobs"):
        within_logprobs_limit(params, [100], LENGTH, most - 1)


@pytest.mark.thorough
def test_without_max_tokens_the_limit_of_logprobs_ends_an_answer():
    params = SamplingParams(max_tokens=None, logprobs=20, n=2)

    def limited(lengths: list[int], most: int, **more: Any) -> SamplingParams:
        return within_logprobs_limit(params, lengths, LENGTH, most, **more)

    assert limited([100], 10 * 2 * 21, max_tokens_given=False).max_tokens == 10
    assert limited([100], 10**6, max_tokens_given=False) == params
    assert limited([100, 100], 10 * 2 * 21, max_tokens_given=False).max_tokens == 5
    for lengths, most, given in (([100], 10 * 2 * 21, True), ([100], 41, False)):
        with pytest.raises(ApiError, match="logprobs are asked for"):
            limited(lengths, most, max_tokens_given=given)
