"""rjax compared with torch on the same weights: first logits, then speed and memory.

    python -m bench.compare_torch --shapes qwen2.5-0.5b                # on a GPU
    python -m bench.compare_torch --shapes tiny --batch 1,4 --prefix 0,64 --own 16 --steps 8
    python -m bench.compare_torch --model FOLDER --methods hand,generate,compiled,continuous

Both load the same model folder (random weights with ``--shapes``) and get the same prompts:
``prefix`` shared tokens and ``own`` unique tokens of each row. Torch runs as transformers'
``generate`` with a static cache ("generate", and "compiled" with torch.compile), as its continuous
batching ("continuous"), and as a decode step written by hand in a CUDA graph: with SDPA ("hand"),
with FlexAttention ("flex"), and with FlexAttention and the prefix read once ("shared").
rjax runs as the engine, including the host, and as the bare jitted step. Each half is a separate
process, so that it has all of the memory; ``--torch-python`` names another interpreter for torch.

With ``--quantization`` both halves round the same weights to fp8 or int4 and multiply them with
kernels of their own: torch by ``_scaled_mm`` (activations in fp8 by token) and
``_weight_int4pack_mm``. Logits are compared with those of the dequantised weights.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from bench import RESULTS
from bench.command_line import command_parser, run, side_environment
from rjax.benchmarks.figures import lines
from rjax.benchmarks.model_shapes import SHAPES, write_folder
from rjax.benchmarks.records import command, save
from rjax.benchmarks.text_tables import text
from rjax.cli.values import some_of, whole, wholes, wholes_or_auto
from rjax.commands.bench.options import add_relay_modes, add_time_limit
from rjax.config import PAGE_SIZES

COLUMNS = {
    "system": "system",
    "batch": "rows",
    "prefix": "prefix",
    "own": "unique tokens",
    "step_ms": "step, ms",
    "tokens_per_s": "tokens/s",
    "memory_gib": "memory, GiB",
    "floor_ms": "roofline, ms",
    "failed": "error",
}
# As torch_side.METHODS, which only a Python with torch can import.
_METHODS = ("hand", "flex", "shared", "continuous", "generate", "compiled")
_LAST_POINT = 20.0  # seconds that a started torch point may still take
_STEPS = ("hand", "flex", "shared")  # the decode steps of torch_side, which can be quantised
_TORCH_TOLERANCE = 5e-2  # of the steps of torch_side
_FP8_TOLERANCE = 0.2  # activations that are rounded to fp8 are off by 3 % in each projection
_TOLERANCE = {"float32": 1e-4, "bfloat16": 4e-2, "float16": 1e-2}


def relative_error(a: np.ndarray, b: np.ndarray) -> float:
    """Norm of the difference over the norm of b; NaN if either has NaN."""
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def compare(options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """Create the weights, run both halves, compare their logits, and merge their rows.

    Raises:
        SystemExit: a half failed, or the logits differ by more than rounding.
    """
    folder = scratch / "model"
    if options.shapes is not None:
        write_folder(options.shapes, folder)
    else:
        folder = Path(options.model).resolve()
    vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
    task = {
        "folder": str(folder),
        "model": options.shapes or folder.name,
        "dtype": options.dtype,
        "seed": options.seed,
        "vocab_size": vocab_size,
        "points": [(b, s) for b in options.batch for s in options.prefix],
        "own": options.own,
        "steps": options.steps,
        "check_tokens": 48,
        "methods": options.methods,
        "relay": options.relay,
        "decode_steps": options.decode_steps,
        "backend": options.backend,
        "page_size": options.page_size,
        "quantization": options.quantization,
        "most_error": max(_TORCH_TOLERANCE, _tolerance(options)),
        **_ends(options.seconds),
    }
    task |= {
        name: str(scratch / f"{name}.npy") for name in ("logits", "hand_logits", "rjax_logits")
    }
    task |= {name: str(scratch / f"{name}.json") for name in ("torch_out", "rjax_out")}
    path = scratch / "task.json"
    path.write_text(json.dumps(task))
    torch_side = [options.torch_python, str(Path(__file__).parent / "torch_side.py")]
    if options.shapes is not None:
        _run([*torch_side, "make", str(path)])
    _run([sys.executable, "-m", "bench.compare_torch.rjax_side", str(path)], imports_rjax=True)
    limit = None if options.seconds is None else task["until"] - time.time() + _LAST_POINT
    _run([*torch_side, "measure", str(path)], limit)
    names = "logits", "hand_logits", "rjax_logits"
    # Torch writes none by hand where it lacks an operation; its rows say so.
    logits = {name: np.load(task[name]) for name in names if Path(task[name]).exists()}
    right = logits["logits"]
    errors = {name: relative_error(logits[name], right) for name in names[1:] if name in logits}
    same = float((logits["rjax_logits"].argmax(-1) == right.argmax(-1)).mean())
    hand = f"{errors['hand_logits']:.1e}" if "hand_logits" in errors else "not available"
    print(
        f"logits against torch's forward: rjax {errors['rjax_logits']:.1e}, torch by hand {hand}; "
        f"likeliest token equal in {same:.0%} of rows"
    )
    if not all(error <= _tolerance(options) for error in errors.values()):
        raise SystemExit(
            f"the logits differ by more than {_tolerance(options):.0e}, which "
            f"{options.quantization or options.dtype} does not explain; the times would compare "
            "different models"
        )
    ours, theirs = (json.loads(Path(task[name]).read_text()) for name in ("rjax_out", "torch_out"))
    environment = ours["environment"]
    environment["versions"]["torch"] = theirs["torch"]
    return {
        "benchmark": "bench.compare_torch",
        "command": command("bench.compare_torch"),
        "environment": environment,
        "settings": {
            key: task[key] for key in ("model", "dtype", "quantization", "seed", "own", "steps")
        },
        "logits": {"relative_error": errors, "same_likeliest": same},
        "rows": ours["rows"] + theirs["rows"],
    }


def _ends(seconds: float | None) -> dict[str, float]:
    """When rjax starts no further engine, and torch no further point: it has the second half."""
    seconds = 1e9 if seconds is None else seconds
    return {"rjax_until": time.time() + seconds / 2, "until": time.time() + seconds}


def _tolerance(options: argparse.Namespace) -> float:
    """The largest relative error of logits that rounding explains."""
    exact = _TOLERANCE[options.dtype]
    return max(exact, _FP8_TOLERANCE) if options.quantization == "fp8" else exact


def _need_torch(python: str) -> None:
    """Exit if that interpreter lacks a module that the torch half imports."""
    seek = (
        "from importlib.util import find_spec as find\n"
        "exit(not (find('torch') and find('transformers')))"
    )
    if subprocess.run([python, "-c", seek], check=False).returncode:
        raise SystemExit(
            f"{python} has no torch or no transformers; install both there, or name an "
            "interpreter that has them with --torch-python"
        )


def _run(arguments: list[str], limit: float | None = None, *, imports_rjax: bool = False) -> None:
    """Run a half to its end, or for ``limit`` seconds; rows written by then count."""
    environment = side_environment(imports_rjax=imports_rjax)
    try:
        done = subprocess.run(arguments, env=environment, timeout=limit, check=False)
    except subprocess.TimeoutExpired:
        print(f"{' '.join(arguments[:3])} was ended after {limit:.0f} s", file=sys.stderr)
        return
    if done.returncode:
        raise SystemExit(f"{' '.join(arguments[:3])} failed with {done.returncode}; see above")


def draw(found: dict[str, Any], path: Path) -> None:
    """Step time over prefix length at the most rows, a line for each system."""
    rows = [row for row in found["rows"] if "step_ms" in row]
    most = max(row["batch"] for row in rows)
    series: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if row["batch"] == most:
            series.setdefault(row["system"], []).append((row["prefix"], row["step_ms"]))
    title = f"{found['settings']['model']}, {most} rows, {found['environment']['device']}"
    lines(path, series, title=title, x="tokens of the shared prefix", y="ms a step", log="xy")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = command_parser("bench.compare_torch", __doc__)
    which = p.add_mutually_exclusive_group(required=True)
    which.add_argument("--shapes", choices=sorted(SHAPES), help="a model's shapes, random weights")
    which.add_argument("--model", help="a model folder of the Llama, Qwen2 or Qwen3 kind")
    p.add_argument("--batch", type=wholes(1), default=[1, 16, 64], help="rows")
    p.add_argument("--prefix", type=wholes(0), default=[0, 512, 2048, 8192], help="shared tokens")
    p.add_argument("--own", type=whole(1), default=128, help="further tokens of each row")
    p.add_argument("--steps", type=whole(1), default=32, help="decode steps of a timed run")
    p.add_argument(
        "--methods", type=some_of(*_METHODS), default="hand,flex,shared", help="of torch; see above"
    )
    add_relay_modes(p)
    p.add_argument(
        "--decode-steps",
        type=wholes_or_auto(1),
        default=[1, 8],
        help="steps that rjax's engine starts at once; auto also warms up",
    )
    p.add_argument("--dtype", choices=sorted(_TOLERANCE), default="bfloat16", help="of both")
    p.add_argument(
        "--quantization",
        choices=("fp8", "int4"),
        help=f"of the weights, in both; torch then runs {', '.join(_STEPS)} alone",
    )
    p.add_argument("--backend", default="auto", help="rjax's attention kernels")
    p.add_argument(
        "--page-size", type=int, choices=PAGE_SIZES, default=64, help="tokens a page of rjax"
    )
    p.add_argument("--seed", type=whole(0), default=0, help="of weights and prompts")
    add_time_limit(p)
    p.add_argument("--torch-python", default=sys.executable, help="interpreter that has torch")
    p.add_argument("--png", type=Path, help="file for the picture")
    return p


def main(arguments: list[str] | None = None) -> None:
    """Compare, print, keep, draw."""
    options = parser().parse_args(arguments)
    if options.quantization is not None and not set(options.methods) <= set(_STEPS):
        raise SystemExit(
            f"--quantization runs with the methods {', '.join(_STEPS)}: transformers has no fp8 or "
            "int4 of its own"
        )
    _need_torch(options.torch_python)
    with tempfile.TemporaryDirectory() as scratch:
        found = compare(options, Path(scratch))
    print(found["environment"]["device"])
    print(text(found["rows"], COLUMNS))
    target = options.json
    if target is None and not found["environment"]["device"].startswith("CPU"):
        name = "compare_torch"
        name += "" if options.quantization is None else f"_{options.quantization}"
        target = RESULTS / f"{name}.json"
    if target is not None:
        save(target, found)
    if options.png is not None:
        draw(found, options.png)


if __name__ == "__main__":
    run("bench.compare_torch", main)
