"""Tokens per second of the engine, end to end, with a shared prefix.

    rjax bench throughput Qwen/Qwen3-0.6B                                 # on a GPU
    rjax bench throughput --requests 8 --prefix 64 --input 16 --output 8  # the bundled model
    rjax bench throughput ./llama --file sharegpt.json --requests 200 --prefix 0 --max-model-len 8k
    rjax bench throughput --shapes llama-3-8b --relay auto,off            # random weights

All requests arrive at once. Each has the shared prefix and a unique input, and generates its output
to the full length. All step shapes run once before the measurement, and the prefix cache is then
cleared, so that the prefill of the prefix is part of the time. ``--relay`` names modes to compare.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from rjax.benchmarks import throughput
from rjax.benchmarks.throughput import NAME, ThroughputSettings
from rjax.cli.arguments import add_model_argument, token_count
from rjax.cli.errors import parse_and_run
from rjax.cli.values import whole
from rjax.commands.bench.options import (
    add_engine_options,
    add_relay_modes,
    add_time_limit,
    benchmark_parser,
    given_settings,
)


def add_throughput_options(p: argparse.ArgumentParser) -> None:
    """Options for the engine and the requests."""
    add_engine_options(p)
    for flags, default, meaning in (
        (("--requests", "--num-prompts"), 512, "all arrive at once"),
        (("--prefix", "--random-prefix-len"), 2048, "tokens that all requests share"),
        (("--input", "--input-len"), 128, "further prompt tokens of each"),
        (("--output", "--output-len"), 256, "tokens generated for each"),
        (("--rounds",), 1, "runs of each mode; the middle one counts"),
    ):
        least = 0 if "--prefix" in flags else 1
        text = f"{meaning} (default: {default})"
        p.add_argument(*flags, metavar="N", type=whole(least), default=default, help=text)
    p.add_argument(
        "--file",
        "--dataset-path",
        type=Path,
        help="ShareGPT JSON or JSON lines, in place of random ids",
    )
    p.add_argument(
        "--max-model-len",
        metavar="N",
        type=token_count,
        help="most tokens of a sequence; default: of these, and --file needs it",
    )
    add_relay_modes(p)
    p.add_argument("--png", metavar="FILE", type=Path, help="file for the picture")
    add_time_limit(p)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    p = benchmark_parser(NAME, __doc__)
    add_model_argument(p)
    add_throughput_options(p)
    return parse_and_run(NAME, p, argv, _run)


def _run(arguments: argparse.Namespace) -> int:
    throughput.run(given_settings(ThroughputSettings, arguments))
    return 0
