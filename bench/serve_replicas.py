"""Throughput of a server with one replica and with several, one on each GPU.

    python -m bench.serve_replicas                      # Llama-3-8B's shapes on two GPUs
    python -m bench.serve_replicas --shapes tiny --replicas 1 2 --requests 16 --suffix-words 8

Each number of replicas is an `rjax serve --replicas N` of its own, with random weights and the
bundled model's tokenizer. It compiles all step sizes, then gets the load of `rjax bench serve`: a
prompt is one of a few long prefixes and a unique end, and a request follows as soon as one of
--streams has ended. "/ first" is the rate over that of the first row.
"""

import argparse
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.command_line import command_parser, keep, run
from bench.serve.fleet import fleet
from bench.serve.model import write_served_model
from rjax.benchmarks.model_shapes import SHAPES
from rjax.benchmarks.records import record
from rjax.benchmarks.serve import ServeSettings
from rjax.benchmarks.serve import run as measure_server
from rjax.cli.values import whole

COLUMNS = {
    "replicas": "replicas",
    "completed": "done",
    "failed": "failed",
    "seconds": "time, s",
    "requests_per_s": "req/s",
    "tokens_per_s": "tok/s",
    "of_first": "/ first",
    "cached_share": "cached",
    "ttft_ms_p50": "TTFT p50, ms",
    "tpot_ms_p50": "TPOT p50, ms",
}
_START_SECONDS = 400.0


def build_parser() -> argparse.ArgumentParser:
    """The benchmark's arguments."""
    p = command_parser("bench.serve_replicas", __doc__)
    p.add_argument("--shapes", choices=sorted(SHAPES), default="llama-3-8b", help="of the model")
    p.add_argument("--replicas", type=whole(1), nargs="+", default=[1, 2], metavar="N")
    p.add_argument("--requests", type=whole(1), default=1024, metavar="N")
    p.add_argument("--streams", type=whole(1), default=256, metavar="N", help="open at once")
    p.add_argument("--prefixes", type=whole(1), default=8, metavar="N", help="different ones")
    p.add_argument("--prefix-words", type=whole(1), default=512, metavar="N")
    p.add_argument("--suffix-words", type=whole(1), default=256, metavar="N")
    p.add_argument("--max-tokens", type=whole(1), default=128, metavar="N", help="of each answer")
    p.add_argument("--max-num-seqs", type=whole(1), default=256, metavar="N", help="of a replica")
    p.add_argument("--log", type=Path, metavar="FILE", help="of the servers, for errors")
    return p


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    arguments = build_parser().parse_args(argv)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        write_served_model(arguments.shapes, Path(folder))
        for count in arguments.replicas:
            row = {"replicas": count} | _measure(arguments, folder, count)
            row["of_first"] = row["requests_per_s"] / (rows or [row])[0]["requests_per_s"]
            rows.append(row)
    # Only now: to ask JAX for the device takes most of its memory from the replicas.
    found = record("bench.serve_replicas", rows, vars(arguments))
    keep(found, COLUMNS, arguments.json, "serve_replicas")


def _measure(arguments: argparse.Namespace, folder: str, replicas: int) -> dict[str, Any]:
    """The load on one fleet."""
    options = ["--load-format", "dummy", "--warmup", "on"]
    options += ["--max-num-seqs", str(arguments.max_num_seqs), "--max-model-len", "4096"]
    with fleet(
        folder, "--replicas", str(replicas), *options, log=arguments.log, seconds=_START_SECONDS
    ) as server:
        settings = ServeSettings(
            url=f"{server.url}/v1",
            rates=[math.inf],
            requests=arguments.requests,
            max_concurrency=arguments.streams,
            prefixes=arguments.prefixes,
            prefix_words=arguments.prefix_words,
            suffix_words=arguments.suffix_words,
            max_tokens=arguments.max_tokens,
        )
        return measure_server(settings)["rows"][0]


if __name__ == "__main__":
    run("bench.serve_replicas", main)
