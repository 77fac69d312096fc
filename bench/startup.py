"""Time from launch to the first token, with an empty and with a filled compilation cache.

    python -m bench.startup --shapes llama-3-8b                    # on a GPU
    python -m bench.startup --shapes llama-3-8b --warmup off,on    # also with the server's warm-up
    python -m bench.startup --shapes tiny --prompt 16              # on any CPU

Each start is a separate process with random weights. The first start fills a new cache folder, and
the second one uses it. "Total" is from the launch of the process to the first token of a prompt;
"next" is the time to the first token of a second prompt. Phases do not include nested phases.
Tracing, lowering and compiling (or loading a compiled program) are parts of the other phases.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.command_line import command_parser, run, some_of, whole
from bench.model_shapes import SHAPES, write_folder
from bench.records import RESULTS, command, save
from bench.text_tables import text

COLUMNS = {
    "model": "model",
    "warmup": "warm-up",
    "cache": "compilation cache",
    "total_s": "total, s",
    "python_s": "python",
    "imports_s": "imports",
    "device_s": "device",
    "weights_s": "weights",
    "pool_s": "pool and profile",
    "engine_s": "engine",
    "warmup_s": "warm-up",
    "first_token_s": "first token",
    "next_first_token_s": "next first token",
    "tracing_s": "tracing",
    "lowering_s": "lowering",
    "compiling_s": "compiling",
    "cache_hits": "cache hits",
    "cache_misses": "cache misses",
}


def start(options: argparse.Namespace, scratch: Path, cache: Path, warmup: str) -> dict[str, Any]:
    """Run one process from launch to first token.

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
            "warmup": warmup,
            "compilation_cache_dir": str(cache),
            "use_tqdm": not options.quiet,
        },
        "prompt": options.prompt,
        "out": str(scratch / "out.json"),
        "launched": time.time(),
    }
    path = scratch / "task.json"
    path.write_text(json.dumps(task))
    command_line = [sys.executable, "-m", "bench.startup_side", str(path)]
    if subprocess.run(command_line, cwd=Path(__file__).parents[1], check=False).returncode:
        raise SystemExit("the engine did not start; see above")
    return json.loads(Path(task["out"]).read_text())


def environment() -> dict[str, Any]:
    """Queried in a separate process: this one must not allocate device memory."""
    code = "import json; from bench.records import environment as e; print(json.dumps(e()))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[1],
        check=True,
        capture_output=True,
        text=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Two starts for each setting of the warm-up."""
    rows = []
    for warmup in options.warmup:
        with tempfile.TemporaryDirectory() as folder:
            scratch = Path(folder)
            for cache in ("empty", "filled"):
                found = start(options, scratch, scratch / "cache", warmup)
                rows.append({"model": options.shapes, "warmup": warmup, "cache": cache} | found)
    backend = rows[0].pop("backend")
    return {
        "benchmark": "bench.startup",
        "command": command("bench.startup"),
        "environment": environment(),
        "settings": {
            name: getattr(options, name) for name in ("prompt", "max_model_len", "max_num_seqs")
        },
        "backend": backend,
        "rows": [{k: v for k, v in row.items() if k != "backend"} for row in rows],
    }


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = command_parser("bench.startup", __doc__)
    p.add_argument("--shapes", choices=sorted(SHAPES), default="llama-3-8b", help="of which model")
    p.add_argument(
        "--warmup",
        type=some_of("off", "on"),
        default="off",
        help="compile every step first: off, on, or both",
    )
    p.add_argument("--prompt", type=whole(1), default=128, help="tokens of the first prompt")
    p.add_argument("--max-model-len", type=whole(1), default=4096, help="most tokens of a sequence")
    p.add_argument("--max-num-seqs", type=whole(1), default=64, help="sequences running at once")
    p.add_argument("--backend", default="auto", help="attention kernels: auto, mosaic or xla")
    return p


def main(arguments: list[str] | None = None) -> None:
    """Measure, print, keep."""
    p = parser()
    options = p.parse_args(arguments)
    if options.prompt >= options.max_model_len:
        p.error(f"--prompt is {options.prompt}; --max-model-len must be more")
    found = measure(options)
    print(found["environment"]["device"])
    print(text(found["rows"], COLUMNS))
    path = options.json
    if path is None and not found["environment"]["device"].startswith("CPU"):
        path = RESULTS / "startup.json"
    if path is not None:
        save(path, found)


if __name__ == "__main__":
    run("bench.startup", main)
