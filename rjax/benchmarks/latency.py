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
from typing import Any

import numpy as np

from rjax.benchmarks.engines import (
    add_engine_options,
    model_length,
    model_name,
    pool_pages,
    running_llm,
)
from rjax.benchmarks.options import (
    add_time_limit,
    benchmark_parser,
    check_picture,
    in_time,
    print_rows,
    whole,
    wholes,
)
from rjax.benchmarks.records import record, save
from rjax.benchmarks.throughput import run_once
from rjax.benchmarks.workload import synthetic
from rjax.cli.arguments import add_model_argument
from rjax.cli.errors import parse_and_run
from rjax.errors import InvalidConfigError

_NAME = "rjax bench latency"
_PREFIXES = (0, 2048, 8192)
COLUMNS = {
    "model": "model",
    "batch": "requests",
    "prefix": "prefix",
    "input": "input",
    "output": "output",
    "cold_first_ms": "TTFT, cold, ms",
    "first_ms": "TTFT, ms",
    "first_p99_ms": "TTFT p99, ms",
    "each_ms": "ITL, ms",
    "each_p99_ms": "ITL p99, ms",
    "whole_ms": "end to end, ms",
}


def measure(options: argparse.Namespace, llm: Any, batch: int, prefix: int) -> dict[str, Any]:
    """One point over several rounds."""

    def answered(seed: int, shared_seed: int) -> list[Any]:
        shared = synthetic(
            1, prefix=prefix, own=0, output=0, vocab_size=vocab_size, seed=shared_seed
        )[0].prompt
        own = synthetic(
            batch,
            prefix=0,
            own=options.input,
            output=options.output,
            vocab_size=vocab_size,
            seed=seed,
        )
        for request in own:
            request.prompt[:0] = shared
        return [o.metrics for o in run_once(llm, own, True)[0]]

    vocab_size = llm.engine.model_config.vocab_size
    answered(1, 1)  # the remaining compilation happens here
    cold = answered(3, options.seed + 2)
    warm = [m for i in range(options.rounds) for m in answered(4 + i, options.seed + 2)]
    first = 1e3 * np.array([m.time_to_first_token for m in warm])
    each = 1e3 * np.array([m.time_per_output_token or 0.0 for m in warm])
    return {
        "model": model_name(options),
        "batch": batch,
        "prefix": prefix,
        "input": options.input,
        "output": options.output,
        "cold_first_ms": float(np.median([1e3 * m.time_to_first_token for m in cold])),
        "first_ms": float(np.median(first)),
        "first_p99_ms": float(np.percentile(first, 99)),
        "each_ms": float(np.median(each)),
        "each_p99_ms": float(np.percentile(each, 99)),
        "whole_ms": float(1e3 * np.median([m.e2e for m in warm])),
    }


def draw(found: dict[str, Any], path: Path) -> None:
    """Inter-token latency over prefix length, a line for each number of requests."""
    from rjax.benchmarks.figures import lines  # needs matplotlib

    rows = found["rows"]
    series = {
        f"{batch} requests": [(r["prefix"], r["each_ms"]) for r in rows if r["batch"] == batch]
        for batch in dict.fromkeys(r["batch"] for r in rows)
    }
    title = f"{rows[0]['model']}, {found['environment']['device']}"
    lines(path, series, title=title, x="tokens of the shared prefix", y="ms a token", log="x")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = benchmark_parser(_NAME, __doc__)
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
    return parse_and_run(_NAME, parser(), argv, _measure_all)


def _measure_all(options: argparse.Namespace) -> int:
    check_picture(options.png)
    if max(options.batch) > options.max_num_seqs:
        raise InvalidConfigError(
            f"--max-num-seqs ({options.max_num_seqs}) is below the largest --batch; raise it"
        )
    own = options.input + options.output
    if options.prefix is None:
        length = model_length(options)
        options.prefix = [prefix for prefix in _PREFIXES if prefix + own <= length] or [0]
    longest = max(options.prefix) + own
    points = [(b, s) for b in options.batch for s in options.prefix]
    found = record(_NAME, [], vars(options))
    pages = pool_pages(options, own, options.prefix)
    with running_llm(options, relay=options.relay, max_model_len=longest, num_pages=pages) as llm:
        llm.engine._worker.warmup(modes=("greedy",))
        found["backend"] = llm.stats().backend
        for point in in_time(points, options.seconds, desc="latency", quiet=options.quiet):
            found["rows"].append(measure(options, llm, *point))
            if options.json is not None:
                save(options.json, found)
    print_rows(found, COLUMNS)
    if options.png is not None:
        draw(found, options.png)
    return 0
