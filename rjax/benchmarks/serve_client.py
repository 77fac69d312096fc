"""A client that sends requests at given times and measures their latency."""

import asyncio
import contextlib
import dataclasses
import json
import time
from collections.abc import Sequence
from typing import Any

import httpx2

from rjax.errors import RjaxError

_POLL_SECONDS = 0.5


class ServerError(RjaxError):
    """The server cannot be measured."""


@dataclasses.dataclass(slots=True)
class Measured:
    """One request; times in seconds after it was sent.

    Attributes:
        first: time of the first chunk with text, reasoning or a tool call; None without any.
        last: time of the last of them.
        end: time of the end of the response.
        prompt_tokens, cached_tokens, tokens: as counted by the server.
        chunks: number of them.
        error: why it failed, or None.
        sent, done: on the clock of the whole run.
    """

    first: float | None = None
    last: float | None = None
    end: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    tokens: int = 0
    chunks: int = 0
    error: str | None = None
    sent: float = 0.0
    done: float = 0.0

    @property
    def per_token(self) -> float | None:
        """Mean seconds per output token after the first."""
        if self.first is None or self.last is None or self.tokens < 2:
            return None
        return (self.last - self.first) / (self.tokens - 1)


class Client:
    """One server.

    Args:
        url: with ``/v1`` at its end.
        key: API key, or None.
    """

    def __init__(self, url: str, key: str | None) -> None:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
        self._http = httpx2.AsyncClient(
            base_url=url.rstrip("/"), headers=headers, timeout=3600, limits=limits
        )

    async def __aenter__(self) -> "Client":
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._http.aclose()

    async def wait_compiled(self) -> None:
        """Wait while /health says that the server starts, or that programs compile. Returns at once
        for servers whose /health does not say so."""
        url = str(self._http.base_url).rstrip("/").removesuffix("/v1") + "/health"
        with contextlib.suppress(httpx2.HTTPError, ValueError, AttributeError):
            while _is_starting((await self._http.get(url)).json()):
                await asyncio.sleep(_POLL_SECONDS)

    async def first_model(self) -> str:
        """Name of the server's first model."""
        try:
            found = await self._http.get("/models")
            return found.raise_for_status().json()["data"][0]["id"]
        except (httpx2.HTTPError, ValueError, LookupError, TypeError) as error:
            raise ServerError(f"{self._http.base_url} lists no model: {error}") from error

    async def ask(self, path: str, body: dict[str, Any]) -> Measured:
        """Send a request and read its stream to the end; failures are stored in ``error``."""
        found = Measured(sent=time.perf_counter())
        try:
            async with self._http.stream("POST", path, json=body) as answer:
                if answer.status_code != 200:
                    text = (await answer.aread()).decode("utf-8", "replace")
                    found.error = f"{answer.status_code}: {text[:300]}"
                else:
                    async for line in answer.aiter_lines():
                        if line.startswith("data:") and line[5:].strip() != "[DONE]":
                            _take(found, json.loads(line[5:]))
        except (httpx2.HTTPError, ValueError) as error:
            found.error = f"{type(error).__name__}: {error}"
        found.done = time.perf_counter()
        found.end = found.done - found.sent
        found.tokens = found.tokens or found.chunks
        if found.error is None and found.first is None and found.tokens == 0:
            found.error = "the answer was empty"
        return found


def _is_starting(health: dict[str, Any]) -> bool:
    """Whether this is the /health of `rjax.serve` while it starts or compiles."""
    return health.get("status") == "starting" or health.get("compiled", 0) < health.get("of", 0)


async def load(
    client: Client,
    path: str,
    bodies: Sequence[dict[str, Any]],
    arrivals: Sequence[float],
    most: int,
) -> list[Measured]:
    """Send each body at its time, with a limit on concurrent requests; the time that a request
    waits for the limit counts."""
    turn = asyncio.Semaphore(most)
    start = time.perf_counter()

    async def one(body: dict[str, Any], at: float) -> Measured:
        await asyncio.sleep(max(0.0, start + at - time.perf_counter()))
        due = time.perf_counter()
        async with turn:
            waited = time.perf_counter() - due
            found = await client.ask(path, body)
        found.sent -= waited
        found.end += waited
        found.first = None if found.first is None else found.first + waited
        found.last = None if found.last is None else found.last + waited
        return found

    return list(await asyncio.gather(*map(one, bodies, arrivals)))


def _generated(choice: dict[str, Any]) -> bool:
    """Whether a chunk of a stream holds something that the model generated."""
    delta = choice.get("delta") or {}
    kinds = ("content", "reasoning", "reasoning_content", "tool_calls")
    return bool(choice.get("text")) or any(delta.get(kind) for kind in kinds)


def _take(found: Measured, event: dict[str, Any]) -> None:
    if "error" in event:
        found.error = str(event["error"])[:300]
        return
    usage = event.get("usage")
    if usage:
        found.prompt_tokens = usage.get("prompt_tokens") or 0
        found.tokens = usage.get("completion_tokens") or 0
        details = usage.get("prompt_tokens_details") or {}
        found.cached_tokens = details.get("cached_tokens") or 0
    for choice in event.get("choices") or ():
        if _generated(choice):
            now = time.perf_counter() - found.sent
            found.first = now if found.first is None else found.first
            found.last = now
            found.chunks += 1
