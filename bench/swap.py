"""Cost of swapping pages to and from host memory during decode steps.

    python -m bench.swap --shapes llama-3-8b                            # on a GPU
    python -m bench.swap --shapes tiny --batch 2 --own 40 --pages 1,4 --steps 3

An engine decodes a constant batch. With every step some pages outside the batch are swapped out, or
in, as by preemption. "Alone" is the time to swap out and in without a step; "GB/s" is the rate of
both transfers together. "Hidden" is the fraction of that time by which the steps did not grow.
Medians over all steps in milliseconds; compilation and memory allocation happen before.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from bench.command_line import command_parser, keep, run
from rjax.batch.page_operations import SwapIn, SwapOut
from rjax.benchmarks.engines import EngineSettings, model_name, running_llm
from rjax.benchmarks.records import record
from rjax.cli.values import whole, wholes
from rjax.commands.bench.options import add_engine_options, given_settings
from rjax.sampling import SamplingParams

COLUMNS = {
    "model": "model",
    "batch": "rows",
    "own": "tokens per row",
    "pages": "pages",
    "mib": "MiB",
    "step_ms": "step, ms",
    "out_ms": "swapping out, ms",
    "in_ms": "swapping in, ms",
    "alone_ms": "out and in alone, ms",
    "gb_s": "GB/s",
    "hidden": "hidden",
}
_UNCOUNTED = 3
_LEAST_BUDGET = 256  # tokens of a step, of those that are worth measuring


def measure(options: argparse.Namespace, model: str, engine: Any) -> list[dict[str, Any]]:
    """Measure a row for each number of pages."""
    worker, most = engine._worker, max(options.pages)
    _start_batch(options, engine)
    found = engine._blocks.allocate(most)
    if found is None or worker.num_host_pages < most:
        raise SystemExit("no room for so many --pages beside the batch; give fewer")
    spare: list[int] = found

    def out(count: int) -> None:
        worker.move([SwapOut(spare[:count], list(range(count)))])

    def back(count: int) -> None:
        worker.move([SwapIn(list(range(count)), spare[:count])])

    def alone(count: int) -> None:
        out(count)
        back(count)
        jax.block_until_ready(worker._state.pools)

    def kinds(count: int) -> dict[str, Callable[[], Any]]:
        return {
            "step_ms": engine.step,
            "out_ms": lambda: (out(count), engine.step()),
            "in_ms": lambda: (back(count), engine.step()),
            "alone_ms": lambda: alone(count),
        }

    def middle(action: Callable[[], Any]) -> float:
        times = []
        for _ in range(_UNCOUNTED + options.steps):
            start = time.perf_counter()
            action()
            times.append(1e3 * (time.perf_counter() - start))
        return statistics.median(times[_UNCOUNTED:])

    for count in options.pages:
        for action in kinds(count).values():
            for _ in range(_UNCOUNTED):
                action()
    rows = []
    for count in tqdm(options.pages, desc="swap", disable=options.quiet):
        num_bytes = count * worker.pool.page_bytes
        row = {
            "model": model,
            "batch": options.batch,
            "own": options.own,
            "pages": count,
            "mib": num_bytes / 2**20,
        }
        row |= {name: middle(action) for name, action in kinds(count).items()}
        grown = row["out_ms"] + row["in_ms"] - 2 * row["step_ms"]
        rows.append(
            row
            | {
                "gb_s": 2 * num_bytes / (1e6 * row["alone_ms"]),
                "hidden": 1 - grown / row["alone_ms"],
            }
        )
    assert engine.stats().num_running == options.batch
    return rows


def _start_batch(options: argparse.Namespace, engine: Any) -> None:
    """Add requests that decode during the whole measurement; returns when all of them decode."""
    rng = np.random.default_rng(options.seed)
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True, detokenize=False)
    for i in range(options.batch):
        own = rng.integers(0, engine.model_config.vocab_size, options.own).tolist()
        engine.add_request(str(i), own, params)
    computed = 0
    while computed != options.batch:  # prompts take more
        before = engine.stats()
        if before.preemptions or not engine.has_unfinished_requests():
            raise SystemExit("no room for the whole --batch; give more --num-pages")
        engine.step()
        computed = engine.stats().step_tokens - before.step_tokens


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = command_parser("bench.swap", __doc__)
    add_engine_options(p)
    p.add_argument("--batch", type=whole(1), default=64, help="sequences that decode")
    p.add_argument("--own", type=whole(1), default=1024, help="prompt tokens of each")
    p.add_argument("--pages", type=wholes(1), default=[4, 16, 64], help="swapped with each step")
    p.add_argument("--steps", type=whole(1), default=30, help="that count, of each kind")
    return p


def main(arguments: list[str] | None = None) -> None:
    """Measure, print, keep."""
    options = parser().parse_args(arguments)
    if options.batch > options.max_num_seqs:
        raise SystemExit(f"--max-num-seqs ({options.max_num_seqs}) is below --batch")
    # The first decode while the others start; then three kinds of steps for each number of pages.
    starting = options.batch * options.own // _LEAST_BUDGET + 1
    measured = 3 * len(options.pages) * (2 * _UNCOUNTED + options.steps)
    longest = options.own + starting + measured + 1
    settings = given_settings(EngineSettings, options)
    with running_llm(settings, relay="auto", max_model_len=longest) as llm:
        rows = measure(options, model_name(settings), llm.engine)
        backend = llm.stats().backend
    keep(record("bench.swap", rows, vars(options), backend=backend), COLUMNS, options.json, "swap")


if __name__ == "__main__":
    run("bench.swap", main)
