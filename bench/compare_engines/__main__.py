"""rjax compared with vLLM or SGLang: the same requests through both engines, one after the other.

    python -m bench.compare_engines --engine vllm --python ~/vllm/bin/python
    python -m bench.compare_engines --engine sglang --python PATH --model ./llama --repeats 5
    python -m bench.compare_engines --engine vllm --python PATH --workloads shared,chat
    python -m bench.compare_engines --engine vllm --python PATH --workloads groups \\
        --max-num-seqs 512
    python -m bench.compare_engines --engine vllm --python PATH --shapes tiny --scale 32

Each engine runs in a process of its own, rjax in this Python and the other one in the Python of
``--python``, on one GPU. Both load the same folder in bfloat16 and get the same token ids, the same
numbers of tokens to generate, the same maximum length and number of sequences, and the same
share of the GPU's memory. Their prefix caches are on. All else is as each engine chooses it.

Workloads (requests; prompt tokens; generated tokens):

{workloads}

Output tokens a second are end to end, from an empty prefix cache, after a run that is not timed:
the median of ``--repeats`` runs, with the difference of the slowest and the fastest as "spread". A
decode step is the time of a run less that of a run of one token, over the steps between them, with
the prompts in the prefix cache. A ratio above 1 says that rjax is faster. An engine that fails in a
workload gets a row that says why, and continues with the next one.
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.ceilings import measure_ceilings
from bench.command_line import command_parser, keep, run
from bench.compare_engines.process import check_python, run_engine
from bench.compare_engines.workloads import DEFAULT, WORKLOADS, Workload
from bench.random_checkpoint import write_checkpoint
from rjax.benchmarks.model_shapes import SHAPES, write_folder
from rjax.benchmarks.records import record
from rjax.cli.values import some_of, whole
from rjax.errors import InvalidConfigError

COLUMNS = {
    "workload": "workload",
    "requests": "requests",
    "n": "samples",
    "prefixes": "prefixes",
    "prefix": "prefix",
    "unique": "unique tokens",
    "output": "output",
    "engine": "engine",
    "output_per_s": "output tokens/s",
    "spread_percent": "spread, %",
    "ratio": "ratio",
    "step_ms": "decode step, ms",
    "step_ratio": "ratio of the steps",
    "cached_percent": "prompt tokens cached, %",
    "failed": "error",
}
_FILE_BYTES = 5 << 30
_ALIGNMENT = 64  # of the maximum length
_SPARE = 8  # tokens of the maximum length that an engine may keep for itself


def compare(options: argparse.Namespace, python: str, scratch: Path) -> dict[str, Any]:
    """Run both engines; the rows and the versions.

    Raises:
        InvalidConfigError: a workload is too long for the model.
    """
    folder, vocab_size, limit = _model(options, scratch)
    workloads = {name: WORKLOADS[name].scaled(options.scale) for name in options.workloads}
    max_model_len = _length(workloads, limit)
    if options.weights == "checkpoint":
        write_checkpoint(options.shapes, folder, file_bytes=_FILE_BYTES, seed=options.seed)
    drawn = {
        name: workload.drawn(
            vocab_size=vocab_size, seed=options.seed, max_num_seqs=options.max_num_seqs
        )
        for name, workload in workloads.items()
    }
    requests = scratch / "requests.json"
    requests.write_text(json.dumps(drawn))
    task = {
        "requests": str(requests),
        "repeats": options.repeats,
        "options": {
            "model": str(folder),
            "dtype": "bfloat16",
            "load_format": "dummy" if options.weights == "dummy" else "auto",
            "max_model_len": max_model_len,
            "max_num_seqs": options.max_num_seqs,
            "gpu_memory_utilization": options.gpu_memory_utilization,
            "seed": options.seed,
        },
    }
    rows: list[dict[str, Any]] = []
    versions: dict[str, str] = {}
    ready: dict[str, float] = {}
    for engine, interpreter in (("rjax", sys.executable), (options.engine, python)):
        if not options.quiet:
            print(f"{engine}: {', '.join(workloads)}", file=sys.stderr, flush=True)
        found = run_engine(
            interpreter, {**task, "engine": engine}, list(workloads), scratch, options.limit
        )
        versions |= found.get("versions", {})
        if "ready_s" in found:
            ready[engine] = found["ready_s"]
        rows += [
            _row(name, workload, engine, drawn[name], found["workloads"][name])
            for name, workload in workloads.items()
        ]
    rows.sort(key=lambda row: list(workloads).index(row["workload"]))
    _add_ratios(rows)
    return {"rows": rows, "versions": versions, "ready_s": ready, "max_model_len": max_model_len}


def _model(options: argparse.Namespace, scratch: Path) -> tuple[Path, int, int]:
    """The model's folder, the size of its vocabulary and its maximum length."""
    if options.model is not None:
        folder = options.model.absolute()
    else:
        folder = scratch / options.shapes
        write_folder(options.shapes, folder)
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return folder, config["vocab_size"], config["max_position_embeddings"]
    except (OSError, ValueError, KeyError) as error:
        raise InvalidConfigError(
            f"--model {options.model}: no config.json of a language model"
        ) from error


def _length(workloads: Mapping[str, Workload], limit: int) -> int:
    """The maximum length that all workloads fit in.

    Raises:
        InvalidConfigError: the model's own is shorter.
    """
    name, longest = max(((n, w.longest) for n, w in workloads.items()), key=lambda pair: pair[1])
    if longest + _SPARE > limit:
        raise InvalidConfigError(
            f"the workload {name} has {longest} tokens a sequence and the engines need {_SPARE} "
            f"more; the model knows {limit}: raise --scale, or choose other --workloads"
        )
    return min(-(-(longest + _SPARE) // _ALIGNMENT) * _ALIGNMENT, limit)


def _row(
    name: str, workload: Workload, engine: str, drawn: dict[str, Any], found: dict[str, Any]
) -> dict[str, Any]:
    row = {"workload": name, **workload.described(), "engine": engine}
    if "failed" in found:
        return row | {"failed": found["failed"]}
    times = found["all_seconds"]
    seconds = statistics.median(times)
    prompt_tokens = sum(len(prompt) for prompt in drawn["prompts"])
    cached = 100 * found["cached_tokens"] / prompt_tokens
    return row | {
        "output_per_s": workload.n * sum(drawn["max_tokens"]) / seconds,
        "spread_percent": 100 * (max(times) - min(times)) / seconds,
        "seconds": seconds,
        "step_ms": found.get("step_ms"),
        "cached_percent": cached if workload.n == 1 else None,  # engines count samples differently
        "all_seconds": times,
    }


def _add_ratios(rows: list[dict[str, Any]]) -> None:
    """Say in the rows of rjax how it compares with the row after it, of the other engine."""
    for ours, theirs in zip(rows[::2], rows[1::2], strict=True):
        if "failed" not in ours and "failed" not in theirs:
            ours["ratio"] = ours["output_per_s"] / theirs["output_per_s"]
            if min(ours["step_ms"] or 0, theirs["step_ms"] or 0) > 0:
                ours["step_ratio"] = theirs["step_ms"] / ours["step_ms"]


def parser() -> argparse.ArgumentParser:
    """The command line."""
    assert __doc__ is not None
    told = "\n".join(f"    {name:16}{_told(workload)}" for name, workload in WORKLOADS.items())
    p = command_parser("bench.compare_engines", __doc__.replace("{workloads}", told))
    p.add_argument("--engine", choices=("vllm", "sglang"), required=True, help="the other engine")
    p.add_argument("--python", metavar="PATH", required=True, help="interpreter that has it")
    which = p.add_mutually_exclusive_group()
    which.add_argument(
        "--shapes",
        "--model-shapes",
        choices=sorted(SHAPES),
        help="a model's shapes, random weights (default: llama-3-8b)",
    )
    which.add_argument("--model", metavar="FOLDER", type=Path, help="a model folder with weights")
    p.add_argument(
        "--weights",
        choices=("dummy", "checkpoint"),
        help="of --shapes: each engine draws its own, or both load a checkpoint, which is written "
        "to a temporary folder (default: dummy)",
    )
    p.add_argument(
        "--workloads",
        type=some_of(*WORKLOADS),
        default=list(DEFAULT),
        metavar="NAMES",
        help=f"see above (default: {','.join(DEFAULT)})",
    )
    p.add_argument(
        "--scale",
        metavar="N",
        type=whole(1),
        default=1,
        help="divide all numbers of a workload, for a first try (default: 1)",
    )
    p.add_argument(
        "--repeats", metavar="N", type=whole(1), default=3, help="timed runs (default: 3)"
    )
    p.add_argument(
        "--max-num-seqs",
        metavar="N",
        type=whole(1),
        default=256,
        help="sequences running at once (default: 256)",
    )
    p.add_argument(
        "--gpu-memory-utilization",
        metavar="SHARE",
        type=_share,
        default=0.9,
        help="of the GPU's memory for weights, KV and workspace; SGLang: for weights and KV "
        "(default: 0.9)",
    )
    p.add_argument("--seed", type=whole(0), default=0, help="of weights, prompts and sampling")
    p.add_argument(
        "--limit",
        metavar="SECONDS",
        type=whole(1),
        default=1800,
        help="end a process of an engine after this time (default: 1800)",
    )
    p.add_argument("--out", dest="json", metavar="FILE", type=Path, help="the same as --json")
    return p


def _told(workload: Workload) -> str:
    facts = workload.described()
    parts = [f"{facts['unique']} unique"]
    if facts["prefixes"]:
        prefixes = "prefix" if facts["prefixes"] == 1 else "prefixes"
        parts.insert(0, f"{facts['prefixes']} {prefixes} of {facts['prefix']}")
    samples = f" x {workload.n} samples" if workload.n > 1 else ""
    return f"{workload.requests}{samples}; {', '.join(parts)}; {facts['output']}"


def _share(given: str) -> float:
    try:
        number = float(given)
    except ValueError:
        number = 0.0
    if not 0 < number <= 1:
        raise argparse.ArgumentTypeError(f"{given!r}: give a share above 0 and up to 1")
    return number


def main(arguments: list[str] | None = None) -> None:
    """Measure, print, keep."""
    p = parser()
    options = p.parse_args(arguments)
    if options.model is None:
        options.shapes = options.shapes or "llama-3-8b"
        options.weights = options.weights or "dummy"
    elif options.weights is not None:
        p.error("--weights is for --shapes; a --model has its own")
    else:
        options.weights = "folder"
    python = check_python(options.python, options.engine)
    with tempfile.TemporaryDirectory() as scratch:
        found = compare(options, python, Path(scratch))
    # The engines are gone: only now may this process use the device.
    ceilings = measure_ceilings()
    kept = ("engine", "weights", "workloads", "scale", "repeats", "max_num_seqs")
    settings = {name: getattr(options, name) for name in (*kept, "gpu_memory_utilization", "seed")}
    result = record(
        "bench.compare_engines",
        found["rows"],
        {
            "model": options.shapes if options.model is None else options.model.absolute().name,
            "dtype": "bfloat16",
            "max_model_len": found["max_model_len"],
            **settings,
        },
        copy_bytes_per_s=ceilings.copy,
        matmul_flop_per_s=ceilings.matmul,
        ready_s=found["ready_s"],
    )
    result["environment"]["versions"] |= found["versions"]
    used = {k: v for k, v in COLUMNS.items() if any(r.get(k) is not None for r in found["rows"])}
    keep(result, used, options.json, f"compare_engines_{options.engine}")


if __name__ == "__main__":
    run("bench.compare_engines", main)
