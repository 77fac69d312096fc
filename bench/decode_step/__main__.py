"""Device time of a whole decode step, compared with its roofline.

    python -m bench.decode_step                       # the table: H200, about three minutes
    python -m bench.decode_step --only qwen2.5-0.5b   # the rows of one model
    python -m bench.decode_step --growth              # 64 rows, a prefix growing to 32768 tokens
    python -m bench.decode_step --few-rows            # 8 and 16 rows, about two minutes
    python -m bench.decode_step --experts             # mixtures of experts, about five minutes
    python -m bench.decode_step --experts --only qwen3 --quantization fp8
    python -m bench.decode_step --experts --only gpt-oss --quantization mxfp4   # as published
    python -m bench.decode_step --max-model-len 131072   # steps for a long maximum sequence length
    python -m bench.decode_step --only qwen3 --num-decode-steps 8   # 8 steps as one program
    python -m bench.decode_step --tensor-parallel-size 2   # rows for several GPUs
    python -m bench.decode_step --model tiny --batch 4 --shared 64 --own 16   # any shape, any CPU

The step is the one the engine runs: embedding, layers, attention over pages, logits, sampling, KV
written in place. Weights are random. The roofline is the sum over the stages of the larger of bytes
at the copy rate and FLOP at the matmul rate, both measured in the same run. Weights and distinct KV
are counted once; everything but GEMMs and attention counts as free. On several GPUs it is that of
one's share, and sums over the devices count as free. Steps and rates are measured in short bursts.
"Sustained" is the time of a step in a continuous run, where a GPU at its power limit lowers its
clock.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from tqdm import tqdm

from bench.ceilings import measure_ceilings
from bench.command_line import command_parser, keep, run, save_part
from bench.decode_step.roofline import DecodeCase
from bench.decode_step.rows import EXPERTS, FEW_ROWS, GROWTH, TABLE, Row, tensor_parallel
from bench.decode_step.step_bench import Bench
from rjax.benchmarks.figures import lines
from rjax.benchmarks.model_shapes import SHAPES
from rjax.benchmarks.records import record
from rjax.cli.values import whole
from rjax.config import PAGE_SIZES
from rjax.models.schemes import ON_LOAD

COLUMNS = {
    "model": "model shapes",
    "layers": "layers",
    "devices": "GPUs",
    "batch": "rows",
    "shared": "shared tokens",
    "own": "unique tokens",
    "relay": "relay",
    "weights": "weights",
    "step_ms": "step, ms",
    "sustained_ms": "sustained, ms",
    "floor_ms": "roofline, ms",
    "ratio": "step / roofline",
    "reach_ratio": "target / roofline",
    "reach_ms": "target, ms",
    "kernels": "kernels per step",
    "compile_s": "compile, s",
}


def measure_all(rows: tuple[Row, ...], options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The record of the rows so far, after each; one model at a time in memory."""
    ceilings = measure_ceilings()
    found = []
    names = list(dict.fromkeys((row.model, row.layers) for row in rows))
    with tqdm(total=len(rows), desc="decode step", disable=options.quiet) as bar:
        for name, layers in names:
            changed = {} if layers is None else {"num_hidden_layers": layers}
            bench = Bench(
                SHAPES[name] | changed,
                backend=options.backend,
                page_size=options.page_size,
                relay=options.relay,
                mode=options.mode,
                quantization=options.quantization,
                max_model_len=options.max_model_len,
                devices=options.tensor_parallel_size,
                num_decode_steps=options.num_decode_steps,
                without=options.without,
            )
            for row in rows:
                if (row.model, row.layers) == (name, layers):
                    found.append(bench.measure(row, ceilings, options.profile))
                    bar.update()
                    yield record(
                        "bench.decode_step",
                        found,
                        vars(options),
                        backend=bench.backend.name,
                        copy_bytes_per_s=ceilings.copy,
                        matmul_flop_per_s=ceilings.matmul,
                    )
            del bench


def draw(found: dict[str, Any], path: Path) -> None:
    """Draw step time and roofline over the length of the shared prefix."""
    rows = found["rows"]
    series = {
        name: [(row["shared"], row[key]) for row in rows]
        for name, key in (("step", "step_ms"), ("roofline", "floor_ms"))
    }
    title = f"{rows[0]['model']}, {rows[0]['batch']} rows, {found['environment']['device']}"
    lines(path, series, title=title, x="tokens of the shared prefix", y="ms a step")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = command_parser("bench.decode_step", __doc__)
    p.add_argument("--only", default="", help="rows of the table whose model name contains this")
    tables = p.add_mutually_exclusive_group()
    tables.add_argument("--growth", action="store_true", help="a growing prefix, not the table")
    tables.add_argument("--experts", action="store_true", help="mixtures of experts in its place")
    tables.add_argument("--few-rows", action="store_true", help="steps of 8 and 16 rows instead")
    p.add_argument("--model", choices=sorted(SHAPES), help="one row of your own, with the next 3")
    p.add_argument("--batch", type=whole(1), default=4, help="rows")
    p.add_argument("--shared", type=whole(0), default=64, help="tokens that all rows share")
    p.add_argument("--own", type=whole(1), default=16, help="further tokens of each row")
    p.add_argument("--relay", choices=("auto", "on", "off"), default="auto", help="shared reads")
    p.add_argument("--mode", choices=("greedy", "random", "full"), default="greedy", help="sampler")
    p.add_argument(
        "--quantization",
        choices=sorted(ON_LOAD),
        help="of the weights; mxfp4 is for experts",
    )
    p.add_argument("--backend", default="auto", help="auto, mosaic or xla")
    p.add_argument("--profile", type=whole(0), default=0, help="print so many kernels of each step")
    p.add_argument("--page-size", type=int, choices=PAGE_SIZES, default=64, help="tokens a page")
    p.add_argument(
        "--tensor-parallel-size",
        type=whole(1),
        default=1,
        help="devices; with more than one, the table is one for several GPUs",
    )
    p.add_argument(
        "--max-model-len", type=whole(1), help="most tokens of a sequence; default: of each row's"
    )
    p.add_argument(
        "--without",
        metavar="KERNEL",
        help="leave a kernel out, such as mosaic.one_row_layer, to see what it gains",
    )
    p.add_argument(
        "--num-decode-steps",
        type=whole(1),
        default=1,
        help="that run as one program; times are of one",
    )
    return p


def main(arguments: list[str] | None = None) -> None:
    """Measure, print, keep."""
    options = parser().parse_args(arguments)
    devices = options.tensor_parallel_size
    if options.model is not None:
        case = DecodeCase(options.batch, options.shared, options.own)
        rows: tuple[Row, ...] = (Row(options.model, case),)
    else:
        table = tensor_parallel(devices) if devices > 1 else TABLE
        table = GROWTH if options.growth else EXPERTS if options.experts else table
        table = FEW_ROWS if options.few_rows else table
        rows = tuple(row for row in table if options.only in row.model)
    if devices > jax.device_count():
        raise SystemExit(
            f"--tensor-parallel-size is {devices}; JAX sees {jax.device_count()} device(s)"
        )
    longest = max((row.case.context for row in rows), default=0)
    if options.max_model_len is not None and options.max_model_len < longest:
        raise SystemExit(
            f"--max-model-len is {options.max_model_len}; these rows have up to {longest} tokens"
        )
    if not rows:
        raise SystemExit(f"no row of the table has a model named like {options.only!r}")
    kind = "_growth" if options.growth else "_experts" if options.experts else ""
    kind = "_few_rows" if options.few_rows else kind
    name = f"decode_step{kind}"
    name += "" if devices == 1 else f"_tp{devices}"
    name += "" if options.quantization is None else f"_{options.quantization}"
    name += "" if options.max_model_len is None else "_long"
    name += "" if options.without is None else "_without"
    name += "_multi" if options.num_decode_steps > 1 else ""
    found: dict[str, Any] = {}
    for found in measure_all(rows, options):
        save_part(found, options.json, name)
    copy, matmul = found["copy_bytes_per_s"] / 1e12, found["matmul_flop_per_s"] / 1e12
    print(f"copy {copy:.3g} TB/s, bf16 {matmul:.3g} TFLOP/s")
    for row in found["rows"]:
        if row["longest"]:
            print(f"{row['model']}, {row['batch']} rows: {row['busy_ms']:.3f} ms busy")
        for kernel in row["longest"]:
            print(f"{1e6 * kernel['seconds']:9.1f} us {kernel['count']:6.1f} x {kernel['name']}")
    keep(found, COLUMNS, options.json, name)


if __name__ == "__main__":
    run("bench.decode_step", main)
