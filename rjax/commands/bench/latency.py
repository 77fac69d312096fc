"""Request latency: time to first token, inter-token latency, end-to-end latency.

    rjax bench latency Qwen/Qwen3-0.6B                                      # on a GPU
    rjax bench latency --batch 1,4 --prefix 0,64 --input 16 --output 8 --rounds 2
    rjax bench latency --shapes llama-3-8b            # its shapes, with random weights

For each number of simultaneous requests and each length of their shared prefix: the median and
the 99th percentile over all requests of several rounds. In a "cold" round the prefix is computed;
in the others it is cached. All step shapes are compiled before.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from rjax.benchmarks import latency
from rjax.benchmarks.latency import NAME, LatencySettings
from rjax.cli.arguments import add_model_argument
from rjax.cli.errors import parse_and_run
from rjax.cli.values import whole, wholes
from rjax.commands.bench.options import (
    add_engine_options,
    add_time_limit,
    benchmark_parser,
    given_settings,
)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = benchmark_parser(NAME, __doc__)
    add_model_argument(p)
    add_engine_options(p)
    p.add_argument(
        "--batch",
        "--batch-size",
        type=wholes(1),
        default=[1, 8, 64],
        help="requests that arrive together (default: 1,8,64)",
    )
    p.add_argument(
        "--prefix",
        type=wholes(0),
        help="tokens that they share (default: those of 0,2048,8192 that fit the model)",
    )
    p.add_argument(
        "--input",
        "--input-len",
        type=whole(1),
        default=128,
        help="further prompt tokens of each (default: 128)",
    )
    p.add_argument(
        "--output",
        "--output-len",
        type=whole(1),
        default=64,
        help="tokens generated for each (default: 64)",
    )
    p.add_argument(
        "--rounds",
        type=whole(1),
        default=5,
        help="of each point, besides the cold one (default: 5)",
    )
    p.add_argument("--relay", choices=("auto", "on", "off"), default="auto", help="(default: auto)")
    p.add_argument("--png", metavar="FILE", type=Path, help="file for the picture")
    add_time_limit(p)
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    return parse_and_run(NAME, parser(), argv, _run)


def _run(arguments: argparse.Namespace) -> int:
    latency.run(given_settings(LatencySettings, arguments))
    return 0
