"""Latency of a server under load, at several rates of Poisson arrivals."""

import asyncio
import dataclasses
import math
import sys
from collections.abc import Sequence
from typing import Any

from rjax.benchmarks import serve_client, serve_report
from rjax.benchmarks.serve_workload import Workload

NAME = "rjax bench serve"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """The server, the load on it, and what counts as good.

    Attributes:
        url: with /v1 at its end.
        model: name on the server; None is its first.
        api_key: API key, if it needs one.
        runs_on: device of the server, for the result.
        rates: requests a second; infinity sends all at once.
        requests: requests at each rate.
        max_concurrency: requests under way at once.
        clients: processes that send them.
        warm_up: simultaneous requests before anything is timed.
        prefixes, prefix_words, suffix_words, max_tokens, chat, temperature, seed: see `Workload`.
        respect_eos: let answers end at EOS.
        goodput: limits of TTFT and TPOT in milliseconds.
    """

    url: str
    model: str | None = None
    api_key: str | None = dataclasses.field(default=None, repr=False)
    runs_on: str | None = None
    rates: Sequence[float] = (1.0, 2.0, 4.0, 8.0, math.inf)
    requests: int = 64
    max_concurrency: int = 1024
    clients: int = 4
    warm_up: int = 32
    prefixes: int = 1
    prefix_words: int = 1024
    suffix_words: int = 32
    max_tokens: int = 64
    chat: bool = False
    respect_eos: bool = False
    temperature: float = 0.0
    seed: int = 0
    goodput: tuple[float, float] = (1000.0, 100.0)


def run(settings: ServeSettings) -> dict[str, Any]:
    """Measure every rate, one after the other."""
    key = settings.api_key
    url = settings.url.rstrip("/")
    model = asyncio.run(_await_model(url, key, settings.model))
    workload = Workload(
        model=model,
        prefixes=settings.prefixes,
        prefix_words=settings.prefix_words,
        suffix_words=settings.suffix_words,
        max_tokens=settings.max_tokens,
        chat=settings.chat,
        ignore_eos=not settings.respect_eos,
        temperature=settings.temperature,
        seed=settings.seed,
    )

    def send(
        bodies: Sequence[dict[str, Any]], arrivals: Sequence[float], most: int
    ) -> list[serve_client.Measured]:
        processes = settings.clients
        path = workload.path
        return serve_client.load(url, key, path, bodies, arrivals, most=most, processes=processes)

    first = workload.warm_up()
    for warmed in send(first, [0.0] * len(first), 1):
        if warmed.error is not None:
            raise serve_client.ServerError(f"the first request failed: {warmed.error}")
    extra = settings.warm_up  # simultaneous requests, for servers that compile by batch size
    if extra:
        send(workload.bodies(-1, extra), [0.0] * extra, settings.max_concurrency)
    rows = []
    for number, rate in enumerate(settings.rates):
        done = send(
            workload.bodies(number, settings.requests),
            workload.arrivals(number, settings.requests, rate),
            settings.max_concurrency,
        )
        rows.append(serve_report.row(rate, done, settings.goodput))
        print(serve_report.line(rows[-1]), file=sys.stderr)
    return serve_report.record(NAME, model, rows, dataclasses.asdict(settings), settings.runs_on)


async def _await_model(url: str, key: str | None, model: str | None) -> str:
    """Wait until the server is ready; returns the model's name."""
    async with serve_client.Client(url, key) as client:
        await client.wait_compiled()
        return model or await client.first_model()
