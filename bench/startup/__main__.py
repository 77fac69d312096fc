"""Time from launch to the first result, with an empty and with a filled compilation cache.

    python -m bench.startup --shapes llama-3-8b                    # on a GPU
    python -m bench.startup --shapes tiny --prompt 16 --json FILE  # on any CPU
    python -m bench.startup --what engine --warmup background      # one kind, one setting
    python -m bench.startup --what engine --tensor-parallel-size 1,2
    python -m bench.startup --what engine --warmup background --quantization fp8
    python -m bench.startup --what generate,serve                  # the commands

Each start is a separate process. The first start of a row fills a new cache folder, and the second
one uses it. Three kinds of start are measured, a table each:

    engine      an engine with random weights of --shapes: first token of the first request
    generate    python -m rjax.generate without arguments, the whole process
    serve       python -m rjax.serve: port open, /health answers 200, answer of the first completion

"Total" is from the launch of the process to the first token, the end, or the first answer; "next
first token" is the time to the first token of a second prompt; "all compiled" is from the launch
until the background compilation is done. Phases do not include nested phases. "First run" is the
first token without waiting for the compiler. Tracing, lowering and compiling (or loading a compiled
program) are of all threads, and lie in the other phases or beside them.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench import RESULTS, ROOT
from bench.command_line import command_parser, run
from bench.startup.commands import start_generate, start_serve
from rjax.benchmarks.model_shapes import SHAPES, write_folder
from rjax.benchmarks.records import command, save
from rjax.benchmarks.text_tables import text
from rjax.cli.values import some_of, whole, wholes

_PHASES = {
    "imports_s": "imports",
    "tokenizer_s": "tokenizer",
    "device_s": "device",
    "weights_s": "weights",
    "pool_s": "pool and profile",
    "warm-up_s": "warm-up",
}
COLUMNS: dict[str, dict[str, str]] = {
    "engine": {
        "model": "model",
        "tensor_parallel_size": "devices",
        "warmup": "warm-up setting",
        "cache": "compilation cache",
        "total_s": "total, s",
        "python_s": "python",
        **_PHASES,
        "first_token_s": "first token",
        "first_run_s": "first run",
        "next_first_token_s": "next first token",
        "all_compiled_s": "all compiled",
        "tracing_s": "tracing",
        "lowering_s": "lowering",
        "compiling_s": "compiling",
        "compilations": "programs compiled",
        "cache_hits": "cache hits",
        "cache_misses": "cache misses",
    },
    "generate": {
        "cache": "compilation cache",
        "total_s": "total, s",
        **_PHASES,
        "prefix_s": "shared prefix",
        "run_s": "run, with the prefix",
        "compile_wait_s": "waited for compilation",
        "output_per_s": "output tokens/s",
    },
    "serve": {
        "cache": "compilation cache",
        "total_s": "total, s",
        "port_s": "port open",
        "health_s": "healthy",
        "first_answer_s": "first answer",
        "second_answer_s": "second answer",
    },
}
"""Columns of the table of each kind."""

TITLES: dict[str, str] = {
    "engine": "An engine with random weights:",
    "generate": "`python -m rjax.generate` without arguments:",
    "serve": "`python -m rjax.serve`, with a completion of one token:",
}


def tables(rows: list[dict[str, Any]], show: Callable[..., str]) -> str:
    """A table for each kind of start.

    Args:
        rows: of a record; ``kind`` is a key of `COLUMNS`, by default "engine".
        show: formats rows and columns.
    """
    parts = []
    for kind, columns in COLUMNS.items():
        some = [row for row in rows if row.get("kind", "engine") == kind]
        if some:
            used = {k: v for k, v in columns.items() if any(r.get(k) is not None for r in some)}
            parts += [TITLES[kind], show(some, used)]
    return "\n\n".join(parts)


def start_engine(
    options: argparse.Namespace, scratch: Path, cache: Path, warmup: str, devices: int
) -> dict[str, Any]:
    """Run one process from launch to first token.

    Args:
        devices: that hold the model (``tensor_parallel_size``).

    Raises:
        SystemExit: it failed.
    """
    task = {
        "options": {
            "model": str(write_folder(options.shapes, scratch / options.shapes)),
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "max_model_len": options.max_model_len,
            "max_num_seqs": options.max_num_seqs,
            "backend": options.backend,
            "quantization": options.quantization,
            "warmup": warmup,
            "tensor_parallel_size": devices,
            "compilation_cache_dir": str(cache),
            "use_tqdm": not options.quiet,
        },
        "prompt": options.prompt,
        "compile_limit": options.limit,
        "out": str(scratch / "out.json"),
        "launched": time.time(),
    }
    path = scratch / "task.json"
    path.write_text(json.dumps(task))
    command_line = [sys.executable, "-m", "bench.startup.side", str(path)]
    if subprocess.run(command_line, cwd=ROOT, check=False).returncode:
        raise SystemExit("the engine did not start; see above")
    return json.loads(Path(task["out"]).read_text())


def environment() -> dict[str, Any]:
    """Queried in a separate process: this one must not allocate device memory."""
    code = "import json; from rjax.benchmarks.records import *; print(json.dumps(environment()))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Two starts of each kind; of the engine, for each number of devices and warm-up setting."""
    rows, backends = [], set()
    for kind in options.what:
        cases: list[dict[str, Any]] = [{}]
        if kind == "engine":
            cases = [
                {"model": options.shapes, "tensor_parallel_size": size, "warmup": warmup}
                for size in options.tensor_parallel_size
                for warmup in options.warmup
            ]
        for case in cases:
            with tempfile.TemporaryDirectory() as folder:
                scratch = Path(folder)
                for cache in ("empty", "filled"):
                    found = _start(kind, options, scratch, case)
                    backends.add(found.pop("backend", None))
                    rows.append({"kind": kind, **case, "cache": cache} | found)
    names = ("what", "prompt", "max_model_len", "max_num_seqs", "quantization")
    backends.discard(None)
    return {
        "benchmark": "bench.startup",
        "command": command("bench.startup"),
        "environment": environment(),
        "settings": {name: getattr(options, name) for name in names},
        **({"backend": backends.pop()} if backends else {}),
        "rows": rows,
    }


def _start(
    kind: str, options: argparse.Namespace, scratch: Path, case: dict[str, Any]
) -> dict[str, Any]:
    cache = scratch / "cache"
    if kind == "generate":
        return start_generate(cache, options.command_options)
    if kind == "serve":
        return start_serve(cache, options.command_options, options.limit)
    return start_engine(options, scratch, cache, case["warmup"], case["tensor_parallel_size"])


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = command_parser("bench.startup", __doc__)
    p.add_argument(
        "--what", type=some_of(*COLUMNS), default=list(COLUMNS), help="engine, generate, serve"
    )
    p.add_argument("--shapes", choices=sorted(SHAPES), default="llama-3-8b", help="of which model")
    p.add_argument(
        "--warmup",
        type=some_of("off", "background", "on"),
        default=["off", "background", "on"],
        help="settings of the engine to compare: off, background, on",
    )
    p.add_argument(
        "--tensor-parallel-size",
        type=wholes(1),
        default=[1],
        metavar="SIZES",
        help="numbers of devices that hold the engine's model, as in 1,2",
    )
    p.add_argument("--prompt", type=whole(1), default=128, help="tokens of the first prompt")
    p.add_argument("--max-model-len", type=whole(1), default=4096, help="most tokens of a sequence")
    p.add_argument("--max-num-seqs", type=whole(1), default=64, help="sequences running at once")
    p.add_argument("--quantization", metavar="NAME", help="of the engine's weights, as rjax.LLM")
    p.add_argument("--backend", default="auto", help="attention kernels: auto, mosaic or xla")
    p.add_argument(
        "--command-options",
        type=str.split,
        default=[],
        metavar="OPTIONS",
        help="further options of both commands, as in --command-options='--num-pages 64'",
    )
    p.add_argument(
        "--limit",
        type=whole(1),
        default=600,
        help="seconds for the start of a server and for the background compilation",
    )
    return p


def main(arguments: list[str] | None = None) -> None:
    """Measure, print, keep."""
    p = parser()
    options = p.parse_args(arguments)
    if options.prompt >= options.max_model_len:
        p.error(f"--prompt is {options.prompt}; --max-model-len must be more")
    found = measure(options)
    print(found["environment"]["device"])
    print(tables(found["rows"], text))
    path = options.json
    if path is None and not found["environment"]["device"].startswith("CPU"):
        path = RESULTS / "startup.json"
    if path is not None:
        save(path, found)


if __name__ == "__main__":
    run("bench.startup", main)
