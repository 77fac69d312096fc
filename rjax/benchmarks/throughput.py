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
import dataclasses
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rjax.benchmarks.engines import add_engine_options, model_name, pool_pages, running_llm
from rjax.benchmarks.options import (
    add_relay_modes,
    add_time_limit,
    benchmark_parser,
    check_picture,
    in_time,
    print_rows,
    whole,
)
from rjax.benchmarks.records import record, save
from rjax.benchmarks.workload import Request, from_file, synthetic
from rjax.cli.arguments import add_model_argument, token_count
from rjax.cli.errors import parse_and_run
from rjax.errors import InvalidConfigError

_NAME = "rjax bench throughput"
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


def lengths(options: argparse.Namespace) -> tuple[int, int]:
    """Tokens of the longest sequence, and those of them after the prefix.

    Raises:
        InvalidConfigError: ``--max-model-len`` is missing, or too low.
    """
    needed = options.prefix + options.input + options.output
    if options.file is not None:
        if options.max_model_len is None:
            raise InvalidConfigError(
                "--file needs --max-model-len, the most tokens of a request; give it"
            )
        return options.max_model_len, options.max_model_len - options.prefix
    longest = options.max_model_len or needed
    if longest < needed:
        raise InvalidConfigError(
            f"--max-model-len is {longest}; each has {needed} tokens: raise it"
        )
    return longest, options.input + options.output


def measure(options: argparse.Namespace, llm: Any) -> Measured:
    """Run the requests ``--rounds`` times on an engine, after a warm-up."""
    vocab_size = llm.engine.model_config.vocab_size
    requests = _requests(options, llm, vocab_size)
    llm.engine._worker.warmup(modes=("greedy",))
    # Other prompts of the same lengths: all shapes compile, and nothing is cached.
    warm = synthetic(
        min(len(requests), 2 * options.max_num_seqs),
        prefix=options.prefix,
        own=options.input,
        output=min(options.output, 4),
        vocab_size=vocab_size,
        seed=options.seed + 1,
    )
    run_once(llm, warm, True)
    rounds = []
    for _ in range(options.rounds):
        llm.reset_prefix_cache()
        before = llm.stats()
        outputs, seconds = run_once(llm, requests, options.quiet)
        rounds.append((seconds, outputs, llm.stats().steps - before.steps))
    seconds, outputs, steps = sorted(rounds, key=lambda r: r[0])[len(rounds) // 2]
    return Measured(outputs, seconds, steps, [r[0] for r in rounds], llm.stats())


def row(options: argparse.Namespace, relay: str, found: Measured) -> dict[str, Any]:
    """The figures of one mode."""
    outputs, seconds = found.outputs, found.seconds
    written = sum(len(o.outputs[0].token_ids) for o in outputs)
    read = sum(len(o.prompt_token_ids) for o in outputs)
    cached = sum(o.num_cached_tokens for o in outputs)
    each = [o.metrics.time_per_output_token for o in outputs]
    each = [x for x in each if x is not None]
    return {
        "model": model_name(options),
        "relay": relay,
        "requests": len(outputs),
        "running": options.max_num_seqs,
        "prefix": options.prefix,
        "input": options.input if options.file is None else None,
        "output": options.output if options.file is None else None,
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


def _requests(options: argparse.Namespace, llm: Any, vocab_size: int) -> list[Request]:
    prefix = synthetic(
        1, prefix=options.prefix, own=0, output=0, vocab_size=vocab_size, seed=options.seed
    )[0].prompt
    if options.file is not None:
        tokenizer = llm.engine.tokenizer
        return from_file(
            options.file,
            lambda text: tokenizer.encode_batch([text])[0],
            count=options.requests,
            prefix=prefix,
            longest=options.max_model_len,
            seed=options.seed,
        )
    return synthetic(
        options.requests,
        prefix=options.prefix,
        own=options.input,
        output=options.output,
        vocab_size=vocab_size,
        seed=options.seed,
    )


def draw(found: dict[str, Any], path: Path) -> None:
    """Output tokens a second by relay mode."""
    from rjax.benchmarks.figures import bars  # needs matplotlib

    groups = {row["relay"]: {"output tokens/s": row["output_per_s"]} for row in found["rows"]}
    row = found["rows"][0]
    title = f"{row['model']}, {row['requests']} requests, prefix {row['prefix']}"
    bars(path, groups, title=title, x="relay attention", y="output tokens a second")


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
    p = benchmark_parser(_NAME, __doc__)
    add_model_argument(p)
    add_throughput_options(p)
    return parse_and_run(_NAME, p, argv, _measure_all)


def _measure_all(options: argparse.Namespace) -> int:
    check_picture(options.png)
    longest, own = lengths(options)
    found = record(_NAME, [], vars(options))
    pages = pool_pages(options, own)
    for relay in in_time(options.relay, options.seconds, desc="throughput", quiet=options.quiet):
        with running_llm(options, relay=relay, max_model_len=longest, num_pages=pages) as llm:
            measured = measure(options, llm)
        found["backend"] = measured.stats.backend
        found["rows"].append(row(options, relay, measured))
        if options.json is not None:
            save(options.json, found)
    print_rows(found, COLUMNS)
    if options.png is not None:
        draw(found, options.png)
    return 0
