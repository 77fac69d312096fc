"""Tokens per second of the engine, end to end, with a shared prefix."""

import dataclasses
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rjax.benchmarks.engines import EngineSettings, model_name, pool_pages, running_llm
from rjax.benchmarks.points import check_picture, in_time, print_rows
from rjax.benchmarks.records import record, save
from rjax.benchmarks.workload import Request, from_file, synthetic
from rjax.errors import InvalidConfigError

NAME = "rjax bench throughput"
REQUEST_COLUMNS = {
    "relay": "relay",
    "requests": "requests",
    "running": "concurrent",
    "prefix": "prefix",
    "input": "input",
    "output": "output",
    "output_per_s": "output tokens/s",
    "total_per_s": "total tokens/s",
    "first_s": "TTFT, s",
    "each_ms": "TPOT, ms",
}
TOTAL_COLUMNS = {
    "kv_gib": "KV, GiB",
    "kv_unshared_gib": "unshared, GiB",
    "seconds": "seconds",
}
COLUMNS = {**REQUEST_COLUMNS, **TOTAL_COLUMNS}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputSettings(EngineSettings):
    """The requests, and the engine that they go to.

    Attributes:
        requests: requests that arrive at once.
        prefix: tokens that all of them share.
        input: further prompt tokens of each.
        output: tokens generated for each.
        rounds: runs of each mode; the middle one counts.
        file: ShareGPT JSON or JSON lines, in place of random ids.
        max_model_len: most tokens of a sequence; None is that of the requests.
        relay: modes of relay attention to compare.
        seconds: no further mode starts after this many seconds.
        json, png: files for the result and its picture.
    """

    requests: int
    prefix: int
    input: int
    output: int
    rounds: int
    file: Path | None
    max_model_len: int | None
    relay: Sequence[str]
    seconds: float | None
    json: Path | None
    png: Path | None


@dataclasses.dataclass(frozen=True, slots=True)
class Measured:
    """The middle one of several runs of the same requests.

    Attributes:
        outputs: outputs of the requests.
        seconds: seconds from the first request to the last token.
        steps: steps of the engine in this time.
        all_seconds: seconds of every run.
        stats: statistics of the engine after the runs.
    """

    outputs: list[Any]
    seconds: float
    steps: int
    all_seconds: list[float]
    stats: Any


def run_once(llm: Any, requests: list[Request], quiet: bool) -> tuple[list[Any], float]:
    """Generate for all requests; return the outputs and the seconds."""
    from rjax import SamplingParams

    params = [
        SamplingParams(temperature=0.0, max_tokens=r.output_tokens, ignore_eos=True)
        for r in requests
    ]
    start = time.perf_counter()
    outputs = llm.generate([r.prompt for r in requests], params, use_tqdm=not quiet)
    return outputs, time.perf_counter() - start


def lengths(settings: ThroughputSettings) -> tuple[int, int]:
    """Tokens of the longest sequence, and those of them after the prefix.

    Raises:
        InvalidConfigError: ``--max-model-len`` is missing, or too low.
    """
    needed = settings.prefix + settings.input + settings.output
    if settings.file is not None:
        if settings.max_model_len is None:
            raise InvalidConfigError(
                "--file needs --max-model-len, the most tokens of a request; give it"
            )
        return settings.max_model_len, settings.max_model_len - settings.prefix
    longest = settings.max_model_len or needed
    if longest < needed:
        raise InvalidConfigError(
            f"--max-model-len is {longest}; each has {needed} tokens: raise it"
        )
    return longest, settings.input + settings.output


def measure(settings: ThroughputSettings, llm: Any) -> Measured:
    """Run the requests ``--rounds`` times on an engine, after a warm-up."""
    vocab_size = llm.engine.model_config.vocab_size
    requests = _requests(settings, llm, vocab_size)
    llm.engine._worker.warmup(modes=("greedy",))
    # Other prompts of the same lengths: all shapes compile, and nothing is cached.
    warm = synthetic(
        min(len(requests), 2 * settings.max_num_seqs),
        prefix=settings.prefix,
        own=settings.input,
        output=min(settings.output, 4),
        vocab_size=vocab_size,
        seed=settings.seed + 1,
    )
    run_once(llm, warm, True)
    rounds = []
    for _ in range(settings.rounds):
        llm.reset_prefix_cache()
        before = llm.stats()
        outputs, seconds = run_once(llm, requests, settings.quiet)
        rounds.append((seconds, outputs, llm.stats().steps - before.steps))
    seconds, outputs, steps = sorted(rounds, key=lambda r: r[0])[len(rounds) // 2]
    return Measured(outputs, seconds, steps, [r[0] for r in rounds], llm.stats())


def row(settings: ThroughputSettings, relay: str, found: Measured) -> dict[str, Any]:
    """The figures of one mode."""
    outputs, seconds = found.outputs, found.seconds
    written = sum(len(o.outputs[0].token_ids) for o in outputs)
    read = sum(len(o.prompt_token_ids) for o in outputs)
    cached = sum(o.num_cached_tokens for o in outputs)
    each = [o.metrics.time_per_output_token for o in outputs]
    each = [x for x in each if x is not None]
    return {
        "model": model_name(settings),
        "relay": relay,
        "requests": len(outputs),
        "running": settings.max_num_seqs,
        "prefix": settings.prefix,
        "input": settings.input if settings.file is None else None,
        "output": settings.output if settings.file is None else None,
        "seconds": seconds,
        "output_per_s": written / seconds,
        "total_per_s": (read + written) / seconds,
        "first_s": statistics.mean(o.metrics.time_to_first_token for o in outputs),
        "each_ms": 1e3 * statistics.mean(each) if each else None,
        "computed_tokens": read - cached + written - len(outputs),
        "cached_tokens": cached,
        "kv_gib": found.stats.peak_kv_bytes / 2**30,
        "kv_unshared_gib": found.stats.peak_kv_bytes_unshared / 2**30,
        "steps": found.steps,
        "all_seconds": found.all_seconds,
    }


def _requests(settings: ThroughputSettings, llm: Any, vocab_size: int) -> list[Request]:
    prefix = synthetic(
        1, prefix=settings.prefix, own=0, output=0, vocab_size=vocab_size, seed=settings.seed
    )[0].prompt
    if settings.file is not None:
        tokenizer = llm.engine.tokenizer
        return from_file(
            settings.file,
            lambda text: tokenizer.encode_batch([text])[0],
            count=settings.requests,
            prefix=prefix,
            longest=lengths(settings)[0],
            seed=settings.seed,
        )
    return synthetic(
        settings.requests,
        prefix=settings.prefix,
        own=settings.input,
        output=settings.output,
        vocab_size=vocab_size,
        seed=settings.seed,
    )


def draw(found: dict[str, Any], path: Path) -> None:
    """Output tokens a second by relay mode."""
    from rjax.benchmarks.figures import bars  # needs matplotlib

    groups = {row["relay"]: {"output tokens/s": row["output_per_s"]} for row in found["rows"]}
    row = found["rows"][0]
    title = f"{row['model']}, {row['requests']} requests, prefix {row['prefix']}"
    bars(path, groups, title=title, x="relay attention", y="output tokens a second")


def run(settings: ThroughputSettings) -> None:
    """Measure every mode; print the table, and write the files.

    Raises:
        InvalidConfigError: the settings contradict each other, or nothing was measured in time.
    """
    check_picture(settings.png)
    longest, own = lengths(settings)
    found = record(NAME, [], dataclasses.asdict(settings))
    pages = pool_pages(settings, own, [settings.prefix])
    for relay in in_time(settings.relay, settings.seconds, desc="throughput", quiet=settings.quiet):
        with running_llm(settings, relay=relay, max_model_len=longest, num_pages=pages) as llm:
            measured = measure(settings, llm)
        found["backend"] = measured.stats.backend
        found["rows"].append(row(settings, relay, measured))
        if settings.json is not None:
            save(settings.json, found)
    print_rows(found, COLUMNS)
    if settings.png is not None:
        draw(found, settings.png)
