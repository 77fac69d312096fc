"""Request latency: time to first token, inter-token latency, end-to-end latency."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rjax.benchmarks.engines import (
    EngineSettings,
    model_length,
    model_name,
    pool_pages,
    running_llm,
)
from rjax.benchmarks.points import check_picture, in_time, print_rows
from rjax.benchmarks.records import record, save
from rjax.benchmarks.throughput import run_once
from rjax.benchmarks.workload import synthetic
from rjax.errors import InvalidConfigError

NAME = "rjax bench latency"
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


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LatencySettings(EngineSettings):
    """What is measured, on which engine.

    Attributes:
        batch: numbers of requests that arrive together.
        prefix: lengths of their shared prefix; None is those of 0, 2048 and 8192 that fit.
        input: further prompt tokens of each.
        output: tokens generated for each.
        rounds: rounds of each point, besides the cold one.
        relay: mode of relay attention.
        seconds: no further point starts after this many seconds.
        json, png: files for the result and its picture.
    """

    batch: Sequence[int]
    prefix: Sequence[int] | None
    input: int
    output: int
    rounds: int
    relay: str
    seconds: float | None
    json: Path | None
    png: Path | None


def measure(settings: LatencySettings, llm: Any, batch: int, prefix: int) -> dict[str, Any]:
    """One point over several rounds."""

    def answered(seed: int, shared_seed: int) -> list[Any]:
        shared = synthetic(
            1, prefix=prefix, own=0, output=0, vocab_size=vocab_size, seed=shared_seed
        )[0].prompt
        own = synthetic(
            batch,
            prefix=0,
            own=settings.input,
            output=settings.output,
            vocab_size=vocab_size,
            seed=seed,
        )
        for request in own:
            request.prompt[:0] = shared
        return [o.metrics for o in run_once(llm, own, True)[0]]

    vocab_size = llm.engine.model_config.vocab_size
    answered(1, 1)  # the remaining compilation happens here
    cold = answered(3, settings.seed + 2)
    warm = [m for i in range(settings.rounds) for m in answered(4 + i, settings.seed + 2)]
    first = 1e3 * np.array([m.time_to_first_token for m in warm])
    each = 1e3 * np.array([m.time_per_output_token or 0.0 for m in warm])
    return {
        "model": model_name(settings),
        "batch": batch,
        "prefix": prefix,
        "input": settings.input,
        "output": settings.output,
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


def run(settings: LatencySettings) -> None:
    """Measure every point; print the table, and write the files.

    Raises:
        InvalidConfigError: the settings contradict each other, or nothing was measured in time.
    """
    check_picture(settings.png)
    if max(settings.batch) > settings.max_num_seqs:
        raise InvalidConfigError(
            f"--max-num-seqs ({settings.max_num_seqs}) is below the largest --batch; raise it"
        )
    own = settings.input + settings.output
    prefixes = settings.prefix
    if prefixes is None:
        length = model_length(settings)
        prefixes = [prefix for prefix in _PREFIXES if prefix + own <= length] or [0]
    longest = max(prefixes) + own
    points = [(b, s) for b in settings.batch for s in prefixes]
    found = record(NAME, [], dataclasses.asdict(settings) | {"prefix": prefixes})
    pages = pool_pages(settings, own, prefixes)
    with running_llm(settings, relay=settings.relay, max_model_len=longest, num_pages=pages) as llm:
        llm.engine._worker.warmup(modes=("greedy",))
        found["backend"] = llm.stats().backend
        for point in in_time(points, settings.seconds, desc="latency", quiet=settings.quiet):
            found["rows"].append(measure(settings, llm, *point))
            if settings.json is not None:
                save(settings.json, found)
    print_rows(found, COLUMNS)
    if settings.png is not None:
        draw(found, settings.png)
