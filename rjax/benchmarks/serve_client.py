"""A client that sends requests at given times and measures their latency."""

import asyncio
import contextlib
import dataclasses
import json
import urllib.parse
from collections.abc import Sequence
from typing import Any

import httpx2

from rjax.benchmarks.stream_client import (
    Address,
    Arrival,
    Streamed,
    stream_load_in_processes,
)
from rjax.errors import RjaxError

_POLL_SECONDS = 0.5


class ServerError(RjaxError):
    """The server cannot be measured."""


@dataclasses.dataclass(slots=True)
class Measured:
    """One request; times in seconds after it was sent.

    Attributes:
        first: time of the first chunk with text, reasoning or a tool call; None without any.
        last: time of the last of these chunks.
        end: time of the end of the response.
        prompt_tokens, cached_tokens, tokens: token counts of the server.
        chunks: number of chunks with text, reasoning or a tool call.
        error: why it failed, or None.
        sent, done: when it was due and when its answer ended, on the clock of the whole run.
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
        url: URL of the server, with ``/v1`` at its end.
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


def _is_starting(health: dict[str, Any]) -> bool:
    """Whether this is the /health of `rjax.serve` while it starts or compiles."""
    return health.get("status") == "starting" or health.get("compiled", 0) < health.get("of", 0)


def load(
    url: str,
    key: str | None,
    path: str,
    bodies: Sequence[dict[str, Any]],
    arrivals: Sequence[float],
    *,
    most: int,
    processes: int,
) -> list[Measured]:
    """Send each body at its time, with a limit on concurrent requests; the time that a request
    waits for the limit counts.

    Args:
        url: URL of the server, with ``/v1`` at its end.
        key: API key, or None.
        path: path of the route, behind the URL's.
        bodies: JSON bodies of the requests.
        arrivals: when to send each, in seconds.
        most: most concurrent requests.
        processes: number of client processes.

    Raises:
        ServerError: a process of the client failed.
    """
    parts = urllib.parse.urlsplit(url)
    tls = parts.scheme == "https"
    assert parts.hostname is not None, "the server has answered under this URL"
    address = Address(parts.hostname, parts.port or (443 if tls else 80), tls, key)
    path = parts.path.rstrip("/") + path
    asked = [Arrival(at, path, body) for at, body in zip(arrivals, bodies, strict=True)]
    try:
        return [
            measured(answer)
            for answer in stream_load_in_processes(address, asked, processes, most=most)
        ]
    except RuntimeError as error:
        raise ServerError(str(error)) from error


def measured(answer: Streamed) -> Measured:
    """The figures of an answer; failures are in ``error``."""
    found = Measured(sent=answer.due, done=answer.end, end=answer.end - answer.due)
    if answer.error is not None or answer.status == 0:
        found.error = answer.error or "the server closed the connection"
        return found
    if answer.status != 200:
        found.error = f"{answer.status}: {''.join(answer.events)[:300]}"
        return found
    try:
        for at, event in zip(answer.times, answer.events, strict=True):
            _take(found, json.loads(event), at)
    except (ValueError, AttributeError) as error:
        found.error = f"{type(error).__name__}: {error}"
    found.tokens = found.tokens or found.chunks
    if found.error is None and not answer.ended:
        found.error = "the answer was cut off"
    if found.error is None and found.first is None and found.tokens == 0:
        found.error = "the answer was empty"
    return found


def _generated(choice: dict[str, Any]) -> bool:
    """Whether a chunk of a stream holds something that the model generated."""
    delta = choice.get("delta") or {}
    kinds = ("content", "reasoning", "reasoning_content", "tool_calls")
    return bool(choice.get("text")) or any(delta.get(kind) for kind in kinds)


def _take(found: Measured, event: dict[str, Any], at: float) -> None:
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
            now = at - found.sent
            found.first = now if found.first is None else found.first
            found.last = now
            found.chunks += 1
