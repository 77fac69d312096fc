"""Time to load a checkpoint, compared with reading its files and with copying to the device.

    python -m bench.load_weights --shapes llama-3-8b --folder FOLDER    # on a GPU
    python -m bench.load_weights --shapes qwen2.5-0.5b --json FILE      # on any CPU
    python -m bench.load_weights --shapes tiny --file-mb 1              # several small files

Writes a bfloat16 safetensors checkpoint with random values, in files as Hugging Face writes them,
to a temporary folder or to --folder, where a later run finds it. Then each measurement is a process
of its own: reading the files into memory, `load_model`, and `jax.device_put` of as many bytes. With
a cold page cache the kernel was asked to forget the files, which a virtual disk may still hold.
GB/s are 10^9 bytes a second. "Compile" is the time of all threads for tracing, lowering and
compiling, which overlaps with reading. "Ratio" is the time of `load_model` divided by the longer of
reading the files, with the same page cache, and the copy: about 1 if everything overlaps.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench import ROOT
from bench.command_line import command_parser, keep, run
from bench.load_weights.side import TASKS
from bench.random_checkpoint import write_checkpoint
from rjax.benchmarks.model_shapes import SHAPES
from rjax.benchmarks.records import record
from rjax.cli.values import whole

COLUMNS = {
    "model": "model",
    "what": "what",
    "page_cache": "page cache",
    "files": "files",
    "gb": "GB",
    "seconds": "s",
    "gb_per_s": "GB/s",
    "compile_s": "compile, s",
    "ratio": "ratio",
}
_MB = 1_000_000
_POINTS = (
    ("read the files", "cold"),
    ("read the files", "warm"),
    ("load_model", "cold"),
    ("load_model", "warm"),
    ("host to device copy", None),
)


def measure(options: argparse.Namespace, scratch: Path) -> list[dict[str, Any]]:
    """A row for each measurement."""
    folder = options.folder or scratch / options.shapes
    files = write_checkpoint(options.shapes, folder, file_bytes=options.file_mb * _MB)
    rows = []
    for what, page_cache in _POINTS:
        task = {
            "what": what,
            "page_cache": page_cache,
            "folder": str(folder),
            "files": [str(file) for file in files],
            "quiet": options.quiet,
        }
        found = _run(task, scratch)
        size = found.pop("bytes")
        rows.append(
            {
                "model": options.shapes,
                "what": what,
                "page_cache": page_cache,
                "files": len(files),
                "gb": size / 1e9,
                "gb_per_s": size / 1e9 / found["seconds"],
                **found,
            }
        )
    seconds = {(row["what"], row["page_cache"]): row["seconds"] for row in rows}
    for row in rows:
        if row["what"] == "load_model":
            read = seconds["read the files", row["page_cache"]]
            row["ratio"] = row["seconds"] / max(read, seconds["host to device copy", None])
    return rows


def _run(task: dict[str, Any], scratch: Path) -> dict[str, Any]:
    """Run one task in a process.

    Raises:
        SystemExit: it failed.
    """
    assert task["what"] in TASKS, task["what"]
    path, out = scratch / "task.json", scratch / "out.json"
    path.write_text(json.dumps(task | {"out": str(out)}))
    command_line = [sys.executable, "-m", "bench.load_weights.side", str(path)]
    if subprocess.run(command_line, cwd=ROOT, check=False).returncode:
        raise SystemExit(f"{task['what']} failed; see above")
    return json.loads(out.read_text())


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = command_parser("bench.load_weights", __doc__)
    p.add_argument("--shapes", choices=sorted(SHAPES), default="llama-3-8b", help="of which model")
    p.add_argument(
        "--folder", type=Path, help="for the checkpoint, which is kept; default: a temporary one"
    )
    p.add_argument("--file-mb", type=whole(1), default=5000, help="size of a file at most, MB")
    return p


def main(arguments: list[str] | None = None) -> None:
    """Measure, print, keep."""
    options = parser().parse_args(arguments)
    with tempfile.TemporaryDirectory() as scratch:
        rows = measure(options, Path(scratch))
    # The processes are done: only now may this one use the device.
    settings = {"shapes": options.shapes, "file_mb": options.file_mb}
    keep(record("bench.load_weights", rows, settings), COLUMNS, options.json, "load_weights")


if __name__ == "__main__":
    run("bench.load_weights", main)
