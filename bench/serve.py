"""Latency of a server under load: Poisson arrivals at a sweep of rates, prompts that share
beginnings. Any server with OpenAI's API will do.

    python -m rjax.serve --port 8000 &
    python -m bench.serve --url http://127.0.0.1:8000/v1 --rates 1,2,4,8,inf
    python -m bench.serve --url http://127.0.0.1:8001/v1 --json other.json --png other.png

Each rate sends the same number of requests; their arrivals are Poisson (inf: all at once). A prompt
is one of a few long beginnings and an end of its own, in plain words, so that every server counts
its own tokens. TTFT is the time to the first piece of text, TPOT the mean time of a token after it,
goodput the requests per second that meet both limits of --goodput.
"""

import argparse
import asyncio
import sys
from pathlib import Path
from typing import Any

from bench import records, serve_client, serve_report
from bench.serve_workload import Workload
from bench.tables import text

MODULE = "bench.serve"


def build_parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    p = argparse.ArgumentParser(
        prog=f"python -m {MODULE}",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("--url", required=True, help="with /v1 at its end")
    p.add_argument("--model", help="name on the server (default: its first)")
    p.add_argument("--api-key-file", type=Path, help="file with the API key")
    p.add_argument("--rates", type=_rates, default=_rates("1,2,4,8,inf"), help="requests a second")
    p.add_argument("--requests", type=int, default=64, help="at each rate (default: 64)")
    p.add_argument("--prefixes", type=int, default=1, help="different beginnings (default: 1)")
    p.add_argument("--prefix-words", type=int, default=1024, help="words of each (default: 1024)")
    p.add_argument("--suffix-words", type=int, default=32, help="words of each end (default: 32)")
    p.add_argument("--max-tokens", type=int, default=64, help="tokens of each answer (default: 64)")
    p.add_argument("--chat", action="store_true", help="chat: the beginning is the system message")
    p.add_argument(
        "--respect-eos",
        action="store_true",
        help="let answers end by themselves; needed where a server does not know ignore_eos",
    )
    p.add_argument("--warm-up", type=int, default=32, help="requests before anything is timed")
    p.add_argument("--max-concurrency", type=int, default=1024, help="requests under way at once")
    p.add_argument("--temperature", type=float, default=0.0)
    p.add_argument("--seed", type=int, default=0, help="of prompts and arrivals")
    p.add_argument(
        "--goodput",
        type=_goodput,
        default=(1000.0, 100.0),
        metavar="TTFT,TPOT",
        help="limits in milliseconds (default: 1000,100)",
    )
    p.add_argument("--json", type=Path, help="file for the result")
    p.add_argument("--png", type=Path, help="file for the picture")
    return p


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    arguments = build_parser().parse_args(argv)
    try:
        found = asyncio.run(run(arguments))
    except (OSError, serve_client.ServerError) as error:
        print(f"{MODULE}: error: {error}", file=sys.stderr)
        return 2
    print(text(found["rows"], serve_report.COLUMNS))
    if arguments.json is not None:
        records.save(arguments.json, found)
    if arguments.png is not None:
        serve_report.picture(arguments.png, found)
    return 0 if all(row["completed"] for row in found["rows"]) else 1


async def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure every rate, one after the other."""
    key = arguments.api_key_file
    client = serve_client.Client(
        arguments.url, None if key is None else key.read_text("utf-8").strip()
    )
    async with client:
        model = arguments.model or await client.first_model()
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
        for body in workload.warm_up():
            warmed = await client.ask(workload.path, body)
            if warmed.error is not None:
                raise serve_client.ServerError(f"the first request failed: {warmed.error}")
        extra = arguments.warm_up  # so many at once, for servers that compile by batch size
        await serve_client.load(
            client,
            workload.path,
            workload.bodies(-1, extra),
            [0.0] * extra,
            arguments.max_concurrency,
        )
        rows = []
        for number, rate in enumerate(arguments.rates):
            done = await serve_client.load(
                client,
                workload.path,
                workload.bodies(number, arguments.requests),
                workload.arrivals(number, arguments.requests, rate),
                arguments.max_concurrency,
            )
            rows.append(serve_report.row(rate, done, arguments.goodput))
            print(serve_report.line(rows[-1]), file=sys.stderr)
    return serve_report.record(MODULE, model, rows, vars(arguments))


def _rates(given: str) -> list[float]:
    rates = [float(x) for x in given.split(",")]
    if not all(rate > 0 for rate in rates):
        raise argparse.ArgumentTypeError(f"{given!r}: rates are above 0, or inf")
    return rates


def _goodput(given: str) -> tuple[float, float]:
    first, each = (float(x) for x in given.split(","))
    return first, each


if __name__ == "__main__":
    sys.exit(main())
