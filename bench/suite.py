"""Runs the benchmarks that need one GPU and nothing else, one after another, then `bench.report`.

    python -m bench.suite              # on a GPU, up to an hour
    python -m bench.suite --list       # only print the commands
    python -m bench.suite --only decode_step,throughput --seconds 300
    python -m bench.suite --into FOLDER    # write the results there, without pages

Each benchmark is a process with a time limit, so that a failure or a hang does not affect the
others. Benchmarks of many points save each point, and start none that may exceed the limit.
`OTHERS` of them have to be run by hand.
"""

import argparse
import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

from bench import RESULTS, ROOT
from rjax.cli.parser import OneLineParser

COMMANDS: dict[str, tuple[str, int]] = {
    "decode_step": ("bench.decode_step --profile 4", 240),
    "decode_step_few_rows": ("bench.decode_step --profile 14 --few-rows", 150),
    "decode_step_few_rows_without": (
        "bench.decode_step --profile 6 --few-rows --without mosaic.post_attention_block",
        150,
    ),
    "decode_step_long": ("bench.decode_step --max-model-len 131072", 240),
    "decode_step_hybrid_fp8": (
        "bench.decode_step --experts --only qwen3.5 --quantization fp8 --profile 16",
        150,
    ),
    "decode_step_growth": ("bench.decode_step --growth --profile 14", 120),
    "throughput": ("bench.throughput --shapes llama-3-8b", 180),
    "prefill": (
        "bench.throughput --shapes llama-3-8b --requests 64 --input 512 --output 1 "
        "--max-num-batched-tokens 8192 --relay auto --rounds 3 --name prefill",
        120,
    ),
    "startup": (
        "bench.startup --what engine,generate,serve --shapes llama-3-8b --warmup background",
        600,
    ),
    "load_weights": ("bench.load_weights --shapes llama-3-8b", 240),
    "compare_torch": (
        "bench.compare_torch --shapes qwen2.5-0.5b --batch 16,64 --prefix 512,2048 "
        "--methods hand,flex,shared,continuous,generate,compiled --relay auto",
        240,
    ),
    "attention": ("bench.attention", 180),
    "latency": ("rjax bench latency --shapes llama-3-8b", 150),
    "latency_qwen3": (
        "rjax bench latency --shapes qwen3-0.6b --num-decode-steps auto --output 512 "
        "--prefix 0,2048 --rounds 3",
        200,
    ),
    "server_share": ("bench.server_share --streams 64 256", 360),
    "rollout": ("bench.rollout --shapes llama-3-8b --what groups", 240),
    "rollout_refill": ("bench.rollout --shapes llama-3-8b --what refill", 600),
    "swap": ("bench.swap --shapes llama-3-8b", 120),
    "update_weights": (
        "bench.update_weights --shapes llama-3-8b --arrays device --rounds 3 --max-num-seqs 16",
        120,
    ),
    "longbench": ("bench.longbench", 120),
}
"""Command and seconds at most, by the name of the result."""

OTHERS = {
    "bench.kernels": "minutes for each of its tables",
    "bench.machine_code": "needs no GPU",
    "rjax bench throughput": "bench.throughput runs the same",
    "rjax bench serve": "needs a server",
    "bench.replicas": "needs no GPU",
    "bench.serve_replicas": "needs several GPUs",
    "bench.compare_engines": "needs vLLM or SGLang",
    "bench.table_answers": "counts answers, no times",
    "bench.quantised_answers": "counts answers, no times",
    "bench.scheduler": "needs no GPU",
    "bench.server_host": "needs no GPU",
}
"""Benchmarks of the page that are not in `COMMANDS`, and why. Options of those that are there, such
as other models, weights or several GPUs, are run by hand too."""

_STOPS_ITSELF = ("throughput", "prefill", "compare_torch", "attention", "latency", "latency_qwen3")
_LAST_POINT = 30.0  # seconds that a started point may still take


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = OneLineParser(
        prog="python -m bench.suite",
        description=f"{__doc__}".replace("`OTHERS` of them have to be run by hand.", _by_hand()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("--only", help=f"of {', '.join(COMMANDS)}; default: all")
    p.add_argument("--seconds", type=float, help="start no benchmark after this many seconds")
    p.add_argument("--into", type=Path, help="folder for the results; default: bench/results")
    p.add_argument("--list", action="store_true", help="print the commands and stop")
    return p


def _by_hand() -> str:
    """The sentence of the help about the others."""
    listed = "\n".join(f"    {name:<24} {why}" for name, why in OTHERS.items())
    return f"Further models, weights and several GPUs are run by hand, and:\n\n{listed}"


def main() -> int:
    """Run, and report failures at the end."""
    options = parser().parse_args()
    names = options.only.split(",") if options.only else list(COMMANDS)
    unknown = [name for name in names if name not in COMMANDS]
    if unknown:
        parser().error(f"{', '.join(unknown)}: choose of {', '.join(COMMANDS)}")
    failed, start = [], time.monotonic()
    for name in names:
        line, limit = COMMANDS[name]
        print(f"python -m {line}" if line.startswith("bench.") else line, flush=True)
        if options.list:
            continue
        if options.seconds is not None:
            limit = min(limit, options.seconds - (time.monotonic() - start))
        if name in _STOPS_ITSELF:
            line += f" --seconds {max(1.0, limit - _LAST_POINT):.0f}"
        folder = options.into or RESULTS
        line += f" --json {shlex.quote(str(folder.resolve() / name))}.json"
        if limit <= 0 or not _run(line, limit):
            failed.append(name)
    if options.list:
        return 0
    if options.into is None:
        _run("bench.report", 60)
    if failed:
        print("failed or out of time: " + ", ".join(failed), file=sys.stderr)
    return 1 if failed else 0


def _run(line: str, limit: float) -> bool:
    """Whether the process succeeded in time. It and its children are stopped in any case."""
    command = [sys.executable, "-m", *shlex.split(line)]
    with subprocess.Popen(command, start_new_session=True, cwd=ROOT) as process:
        try:
            return process.wait(limit) == 0
        except subprocess.TimeoutExpired:
            return False
        finally:
            with contextlib.suppress(ProcessLookupError):  # none is left
                os.killpg(process.pid, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
