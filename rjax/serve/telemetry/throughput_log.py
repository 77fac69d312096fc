"""Logs the throughput of a busy server."""

import asyncio
import logging
import time

from rjax.api.async_engine import AsyncLLMEngine
from rjax.engine.stats import EngineStats
from rjax.errors import EngineDeadError

_log = logging.getLogger("rjax.serve")


async def log_throughput(engine: AsyncLLMEngine, interval: float) -> None:
    """Log a line every ``interval`` seconds in which the engine did something, until it ends."""
    try:
        before, start = await engine.call_utility("stats"), time.monotonic()
        while True:
            await asyncio.sleep(interval)
            now, end = await engine.call_utility("stats"), time.monotonic()
            line = throughput_line(before, now, end - start)
            if line is not None:
                _log.info("%s", line)
            before, start = now, end
    except EngineDeadError:
        return


def throughput_line(before: EngineStats, now: EngineStats, seconds: float) -> str | None:
    """The log line of what the engine did in an interval; None if it did nothing.

    Args:
        before: statistics at the start of the interval.
        now: statistics at the end of the interval.
        seconds: length of the interval.
    """
    prompt = now.prompt_tokens - before.prompt_tokens
    output = now.output_tokens - before.output_tokens
    if now.steps == before.steps and not (now.num_running or now.num_waiting):
        return None
    read = now.kv_tokens_read - before.kv_tokens_read
    unshared = now.kv_tokens_unshared - before.kv_tokens_unshared
    cached = now.cached_tokens - before.cached_tokens
    waiting = now.num_waiting + now.num_swapped
    return (
        f"prompt {prompt / seconds:,.1f} tok/s, output {output / seconds:,.1f} tok/s, "
        f"running {now.num_running}, waiting {waiting}, "
        f"KV in use {_percent(now.kv_bytes_used, now.kv_bytes_total)}, "
        f"prefix hit rate {_percent(cached, prompt)}, "
        f"token reads saved {_percent(max(0, unshared - read), unshared)}"
    )


def _percent(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "-"
