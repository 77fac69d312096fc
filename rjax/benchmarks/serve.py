"""Latency of a server under load: Poisson arrivals at several rates, prompts with shared prefixes.

Measures any server with OpenAI's API.

    rjax serve --port 8000 &
    rjax bench serve --url http://127.0.0.1:8000/v1 --rates 1,2,4,8,inf
    rjax bench serve --url http://127.0.0.1:8001/v1 --json other.json --png other.png
    rjax bench serve --url https://host/v1 --api-key-file key.txt --chat --respect-eos

Each rate sends the same number of requests with Poisson arrivals (inf: all at once). A prompt is
one of a few long prefixes and a unique suffix. Prompts are text; each server counts its own tokens.
TTFT is the time to the first text, TPOT the mean time per output token after the first, goodput the
requests per second that meet both limits of --goodput.
"""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rjax.benchmarks import records, serve_client, serve_report
from rjax.benchmarks.options import check_picture, whole
from rjax.benchmarks.serve_workload import Workload
from rjax.benchmarks.text_tables import text
from rjax.cli.errors import parse_and_run
from rjax.cli.exit_status import FAILED
from rjax.cli.parser import OneLineParser

_NAME = "rjax bench serve"


def build_parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    p = OneLineParser(
        prog=_NAME,
        usage="%(prog)s --url URL [options]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    server = p.add_argument_group("server")
    server.add_argument("--url", required=True, help="with /v1 at its end")
    server.add_argument("--model", metavar="NAME", help="name on the server (default: its first)")
    server.add_argument("--api-key", metavar="KEY", help="API key; prefer --api-key-file")
    server.add_argument("--api-key-file", metavar="FILE", type=Path, help="file with the API key")
    server.add_argument("--runs-on", metavar="TEXT", help="device of the server, for the result")
    load = p.add_argument_group("load")
    load.add_argument(
        "--rates",
        "--request-rate",
        metavar="R,R,...",
        type=_rates,
        default=_rates("1,2,4,8,inf"),
        help="requests a second (default: 1,2,4,8,inf)",
    )
    _number(load, "--requests", 64, "at each rate", "--num-prompts")
    _number(load, "--max-concurrency", 1024, "requests under way at once")
    _number(load, "--clients", 4, "processes that send them, with a core each at best")
    _number(load, "--warm-up", 32, "requests before anything is timed", "--num-warmups", least=0)
    prompts = p.add_argument_group("prompts and answers")
    _number(prompts, "--prefixes", 1, "different beginnings")
    _number(prompts, "--prefix-words", 1024, "words of each")
    _number(prompts, "--suffix-words", 32, "words of each end")
    _number(prompts, "--max-tokens", 64, "tokens of each answer")
    prompts.add_argument(
        "--chat", action="store_true", help="chat: the prefix is the system message"
    )
    prompts.add_argument(
        "--respect-eos",
        action="store_true",
        help="let answers end at EOS; needed for servers without ignore_eos",
    )
    prompts.add_argument("--temperature", metavar="T", type=float, default=0.0, help="(default: 0)")
    _number(prompts, "--seed", 0, "of prompts and arrivals", least=0)
    result = p.add_argument_group("result")
    result.add_argument(
        "--goodput",
        type=_goodput,
        default=(1000.0, 100.0),
        metavar="TTFT,TPOT",
        help="limits in milliseconds (default: 1000,100)",
    )
    result.add_argument("--json", metavar="FILE", type=Path, help="file for the result")
    result.add_argument(
        "--png", metavar="FILE", type=Path, help="file for the picture of latency over load"
    )
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status: 1 if a rate had no answer, 2 for bad input."""
    return parse_and_run(_NAME, build_parser(), argv, _measure_all)


def _measure_all(arguments: argparse.Namespace) -> int:
    check_picture(arguments.png)
    found = run(arguments)
    print(text(found["rows"], serve_report.COLUMNS))
    if arguments.json is not None:
        records.save(arguments.json, found)
    if arguments.png is not None:
        serve_report.picture(arguments.png, found)
    return 0 if all(row["completed"] for row in found["rows"]) else FAILED


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure every rate, one after the other."""
    key = arguments.api_key
    if arguments.api_key_file is not None:
        key = arguments.api_key_file.read_text("utf-8").strip()
    url = arguments.url.rstrip("/")
    model = asyncio.run(_await_model(url, key, arguments.model))
    workload = Workload(
        model=model,
        prefixes=arguments.prefixes,
        prefix_words=arguments.prefix_words,
        suffix_words=arguments.suffix_words,
        max_tokens=arguments.max_tokens,
        chat=arguments.chat,
        ignore_eos=not arguments.respect_eos,
        temperature=arguments.temperature,
        seed=arguments.seed,
    )

    def send(
        bodies: Sequence[dict[str, Any]], arrivals: Sequence[float], most: int
    ) -> list[serve_client.Measured]:
        processes = arguments.clients
        path = workload.path
        return serve_client.load(url, key, path, bodies, arrivals, most=most, processes=processes)

    first = workload.warm_up()
    for warmed in send(first, [0.0] * len(first), 1):
        if warmed.error is not None:
            raise serve_client.ServerError(f"the first request failed: {warmed.error}")
    extra = arguments.warm_up  # simultaneous requests, for servers that compile by batch size
    if extra:
        send(workload.bodies(-1, extra), [0.0] * extra, arguments.max_concurrency)
    rows = []
    for number, rate in enumerate(arguments.rates):
        done = send(
            workload.bodies(number, arguments.requests),
            workload.arrivals(number, arguments.requests, rate),
            arguments.max_concurrency,
        )
        rows.append(serve_report.row(rate, done, arguments.goodput))
        print(serve_report.line(rows[-1]), file=sys.stderr)
    return serve_report.record(_NAME, model, rows, vars(arguments), arguments.runs_on)


async def _await_model(url: str, key: str | None, model: str | None) -> str:
    """Wait until the server is ready; returns the model's name."""
    async with serve_client.Client(url, key) as client:
        await client.wait_compiled()
        return model or await client.first_model()


def _number(
    group: Any, name: str, default: int, meaning: str, *others: str, least: int = 1
) -> None:
    group.add_argument(
        name,
        *others,
        metavar="N",
        type=whole(least),
        default=default,
        help=f"{meaning} (default: {default})",
    )


def _rates(given: str) -> list[float]:
    rates = _numbers(given)
    if not all(rate > 0 for rate in rates):
        raise argparse.ArgumentTypeError(f"{given!r}: rates are above 0, or inf")
    return rates


def _goodput(given: str) -> tuple[float, float]:
    limits = _numbers(given)
    if len(limits) != 2 or not all(limit > 0 for limit in limits):
        raise argparse.ArgumentTypeError(f"{given!r}: give two numbers above 0, as in 1000,100")
    return limits[0], limits[1]


def _numbers(given: str) -> list[float]:
    try:
        return [float(x) for x in given.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{given!r}: give numbers with commas between") from None
