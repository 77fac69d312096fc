"""Tokens per second of the engine, end to end, with a shared prefix.

    python -m bench.throughput --shapes llama-3-8b               # on a GPU
    python -m bench.throughput --shapes tiny --requests 8 --prefix 64 --input 16 --output 8
    python -m bench.throughput --file sharegpt.json --requests 200 --prefix 0
    python -m bench.throughput --shapes llama-3-8b --requests 64 --input 512 --output 1  # prefill

All requests arrive at once. Each has the shared prefix and a unique input, and generates its output
to the full length. All step shapes run once before the measurement, and the prefix cache is then
cleared, so that the prefill of the prefix is part of the time. ``--relay`` names modes to compare.

"/ bare step" is the output rate over that of the decode step alone, timed in the same process at
full batch and half the output, in a sustained run. The difference is lost to prompts, to the start
and end of the run, and to the host. A "burst" step is faster, because the GPU is not yet at its
power limit. TFLOP/s counts the GEMMs and the attention of computed tokens, without cached tokens.
"""

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

from bench.bare_step import time_bare_step
from bench.ceilings import Ceilings, measure_ceilings
from bench.command_line import (
    add_relay_modes,
    add_time_limit,
    command_parser,
    in_time,
    keep,
    run,
    save_part,
    whole,
)
from bench.engines import add_engine_options, model_name, pool_pages, running_llm
from bench.figures import bars
from bench.records import record
from bench.step_roofline import DecodeCase
from bench.workload import Request, from_file, synthetic
from models import ModelConfig

COLUMNS = {
    "model": "model",
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
    "bare_ms": "bare step, ms",
    "bare_share": "/ bare step",
    "burst_ms": "bare step, burst, ms",
    "burst_share": "/ burst",
    "tflop_per_s": "TFLOP/s",
    "matmul_share": "/ matmul rate",
    "kv_gib": "KV, GiB",
    "kv_unshared_gib": "unshared, GiB",
    "seconds": "seconds",
}


def useful_flops(config: ModelConfig, outputs: list[Any]) -> float:
    """FLOP of the GEMMs and the attention of all computed tokens.

    Tokens from the prefix cache and the last token of each output are not computed; logits count
    only for sampled tokens.
    """
    D, H, L = config.hidden_size, config.head_dim, config.num_layers
    heads = 2 * config.num_heads + 2 * config.num_kv_heads
    layer = D * heads * H + (2 + config.gated_mlp) * D * config.intermediate_size
    computed = seen = sampled = 0
    for output in outputs:
        start = output.num_cached_tokens
        written = len(output.outputs[0].token_ids)
        stop = len(output.prompt_token_ids) + written - 1
        computed += stop - start
        seen += (stop * (stop + 1) - start * (start + 1)) // 2
        sampled += written
    products = 2.0 * computed * L * layer + 2.0 * sampled * D * config.vocab_size
    return products + 4.0 * seen * L * config.num_heads * H


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


def measure(
    options: argparse.Namespace, relay: str, ceilings: Ceilings
) -> tuple[dict[str, Any], str]:
    """One engine, one mode; the row and the attention backend."""
    own = options.input + options.output
    longest = options.max_model_len or options.prefix + own
    if options.file is not None:
        own = longest - options.prefix
    with running_llm(
        options, relay=relay, max_model_len=longest, num_pages=pool_pages(options, own)
    ) as llm:
        config = llm.engine.model_config
        requests = _requests(options, llm, config.vocab_size, longest)
        llm.engine._worker.warmup(modes=("greedy",))
        # Other prompts of the same lengths: all shapes compile, and nothing is cached.
        warm = synthetic(
            min(len(requests), 2 * options.max_num_seqs),
            prefix=options.prefix,
            own=options.input,
            output=min(options.output, 4),
            vocab_size=config.vocab_size,
            seed=options.seed + 1,
        )
        run_once(llm, warm, True)
        rounds = []
        for _ in range(options.rounds):
            llm.reset_prefix_cache()
            before = llm.stats()
            outputs, seconds = run_once(llm, requests, options.quiet)
            rounds.append((seconds, outputs, llm.stats().steps - before.steps))
        after = llm.stats()
        batch = min(options.max_num_seqs, len(requests))
        case = DecodeCase(batch, options.prefix, options.input + options.output // 2)
        bare = None
        if options.output > 1 and options.file is None:
            bare = time_bare_step(llm, case)
    seconds, outputs, steps = sorted(rounds, key=lambda r: r[0])[len(rounds) // 2]
    written = sum(len(o.outputs[0].token_ids) for o in outputs)
    read = sum(len(o.prompt_token_ids) for o in outputs)
    cached = sum(o.num_cached_tokens for o in outputs)
    each = [o.metrics.time_per_output_token for o in outputs]
    each = [x for x in each if x is not None]
    rate = useful_flops(config, outputs) / seconds
    row = {
        "model": model_name(options),
        "relay": relay,
        "requests": len(requests),
        "running": options.max_num_seqs,
        "prefix": options.prefix,
        "input": options.input if options.file is None else None,
        "output": options.output if options.file is None else None,
        "seconds": seconds,
        "output_per_s": written / seconds,
        "total_per_s": (read + written) / seconds,
        "first_s": statistics.mean(o.metrics.time_to_first_token for o in outputs),
        "each_ms": 1e3 * statistics.mean(each) if each else None,
        "bare_ms": None if bare is None else 1e3 * bare.sustained,
        "bare_share": None if bare is None else written / seconds * bare.sustained / batch,
        "burst_ms": None if bare is None else 1e3 * bare.burst,
        "burst_share": None if bare is None else written / seconds * bare.burst / batch,
        "computed_tokens": read - cached + written - len(outputs),
        "cached_tokens": cached,
        "tflop_per_s": rate / 1e12,
        "matmul_share": rate / ceilings.matmul,
        "kv_gib": after.peak_kv_bytes / 2**30,
        "kv_unshared_gib": after.peak_kv_bytes_unshared / 2**30,
        "steps": steps,
        "all_seconds": [r[0] for r in rounds],
    }
    return row, after.backend


def _requests(
    options: argparse.Namespace, llm: Any, vocab_size: int, longest: int
) -> list[Request]:
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
            longest=longest,
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
    groups = {row["relay"]: {"output tokens/s": row["output_per_s"]} for row in found["rows"]}
    row = found["rows"][0]
    title = f"{row['model']}, {row['requests']} requests, prefix {row['prefix']}"
    bars(path, groups, title=title, x="relay attention", y="output tokens a second")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = command_parser("bench.throughput", __doc__)
    add_engine_options(p)
    p.add_argument("--requests", type=whole(1), default=512, help="all arrive at once")
    p.add_argument("--prefix", type=whole(0), default=2048, help="tokens that all requests share")
    p.add_argument("--input", type=whole(1), default=128, help="further prompt tokens of each")
    p.add_argument("--output", type=whole(1), default=256, help="tokens generated for each")
    p.add_argument("--file", type=Path, help="ShareGPT JSON or JSON lines, in place of random ids")
    p.add_argument(
        "--max-model-len",
        type=whole(1),
        help="most tokens of a sequence; default: of these, and --file needs it",
    )
    add_relay_modes(p)
    p.add_argument(
        "--rounds", type=whole(1), default=1, help="runs of each mode; the middle one counts"
    )
    p.add_argument("--png", type=Path, help="file for the picture")
    p.add_argument("--name", default="throughput", help="name of the kept result")
    add_time_limit(p)
    return p


def main(arguments: list[str] | None = None) -> None:
    """Measure, print, keep, draw."""
    options = parser().parse_args(arguments)
    if options.file is not None and options.max_model_len is None:
        raise SystemExit("--file needs --max-model-len, the most tokens of a request")
    needed = options.prefix + options.input + options.output
    if options.file is None and (options.max_model_len or needed) < needed:
        raise SystemExit(f"--max-model-len is {options.max_model_len}; each has {needed} tokens")
    ceilings = measure_ceilings()
    found = record("bench.throughput", [], vars(options), matmul_flop_per_s=ceilings.matmul)
    modes = options.relay
    for relay in in_time(modes, options.seconds, desc="throughput", quiet=options.quiet):
        row, found["backend"] = measure(options, relay, ceilings)
        found["rows"].append(row)
        save_part(found, options.json, options.name)
    keep(found, COLUMNS, options.json, options.name)
    if options.png is not None:
        draw(found, options.png)


if __name__ == "__main__":
    run("bench.throughput", main)
