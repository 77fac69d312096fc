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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rjax.benchmarks import records, serve, serve_report
from rjax.benchmarks.points import check_picture
from rjax.benchmarks.serve import NAME, ServeSettings
from rjax.benchmarks.text_tables import text
from rjax.cli.errors import parse_and_run
from rjax.cli.exit_status import FAILED
from rjax.cli.parser import OneLineParser
from rjax.cli.values import whole
from rjax.commands.bench.options import given_settings


def build_parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    p = OneLineParser(
        prog=NAME,
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
        default=ServeSettings.rates,
        help="requests a second (default: 1,2,4,8,inf)",
    )
    _number(load, "--requests", "at each rate", "--num-prompts")
    _number(load, "--max-concurrency", "requests under way at once")
    _number(load, "--clients", "processes that send them, with a core each at best")
    _number(load, "--warm-up", "requests before anything is timed", "--num-warmups", least=0)
    prompts = p.add_argument_group("prompts and answers")
    _number(prompts, "--prefixes", "different beginnings")
    _number(prompts, "--prefix-words", "words of each")
    _number(prompts, "--suffix-words", "words of each end")
    _number(prompts, "--max-tokens", "tokens of each answer")
    prompts.add_argument(
        "--chat", action="store_true", help="chat: the prefix is the system message"
    )
    prompts.add_argument(
        "--respect-eos",
        action="store_true",
        help="let answers end at EOS; needed for servers without ignore_eos",
    )
    prompts.add_argument(
        "--temperature",
        metavar="T",
        type=float,
        default=ServeSettings.temperature,
        help="(default: 0)",
    )
    _number(prompts, "--seed", "of prompts and arrivals", least=0)
    result = p.add_argument_group("result")
    result.add_argument(
        "--goodput",
        type=_goodput,
        default=ServeSettings.goodput,
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
    return parse_and_run(NAME, build_parser(), argv, _run)


def _run(arguments: argparse.Namespace) -> int:
    check_picture(arguments.png)
    if arguments.api_key_file is not None:
        arguments.api_key = arguments.api_key_file.read_text("utf-8").strip()
    found = serve.run(given_settings(ServeSettings, arguments))
    print(text(found["rows"], serve_report.COLUMNS))
    if arguments.json is not None:
        records.save(arguments.json, found)
    if arguments.png is not None:
        serve_report.picture(arguments.png, found)
    return 0 if all(row["completed"] for row in found["rows"]) else FAILED


def _number(group: Any, name: str, meaning: str, *others: str, least: int = 1) -> None:
    default = getattr(ServeSettings, name.removeprefix("--").replace("-", "_"))
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
