"""Requests to an asynchronous engine, and waiting for what it does."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

from rjax.api.async_engine import AsyncLLMEngine
from rjax.sampling import RequestOutputKind, SamplingParams


def tokens(count: int, **more: Any) -> SamplingParams:
    """Parameters of a request that ends after ``count`` tokens and streams them."""
    return SamplingParams(max_tokens=count, **{"output_kind": RequestOutputKind.DELTA, **more})


async def collect(engine: AsyncLLMEngine, prompt: list[int], params: SamplingParams) -> list[int]:
    outputs = engine.generate(prompt, params)
    return [token async for o in outputs for token in o.outputs[0].token_ids]


async def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        await asyncio.sleep(0.005)


async def until_stuck(engine: AsyncLLMEngine) -> None:
    """Until the engine gives no more signs of life, as in a step that does not end; an idle one
    gives four a second."""
    beat = None
    while engine.channel.heartbeat != beat:
        beat = engine.channel.heartbeat
        await asyncio.sleep(0.5)
