"""The attention kernels and the GEMMs: each result checked against float32, then timed.

    python -m bench.kernels                    # the table, with rooflines and targets
    python -m bench.kernels --sweep            # with and without relay over batch and prefix length
    python -m bench.kernels --peers            # compared with JAX and torch
    python -m bench.kernels --products         # GEMMs of few rows, by weight scheme
    python -m bench.kernels --experts          # experts of a layer, compared with JAX and torch
    python -m bench.kernels --experts --quantization fp8
    python -m bench.kernels --sums             # the sum over all devices, residual and norm
    python -m bench.kernels --delta            # the gated delta rule, compared with fla
    python -m bench.kernels --small --backend xla

A run on a GPU saves each row in bench/results/; with ``--only`` or ``--small`` only if ``--json``
names a file. ``python -m bench.kernels.cost_model`` fits the cost model of the engine.
"""

import argparse
import sys
from pathlib import Path

import jax

from bench import RESULTS
from bench.command_line import command_parser, run
from bench.kernels.backends import NAMES
from bench.kernels.cases.experts import SCHEMES
from bench.kernels.result_file import ResultFile
from bench.kernels.run_delta import run_delta
from bench.kernels.run_experts import run_experts
from bench.kernels.run_peers import run_peers, run_torch
from bench.kernels.run_products import run_products
from bench.kernels.run_sums import run_sums
from bench.kernels.run_table import run_table
from bench.kernels.sweep import draw, run_sweep


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = command_parser("bench.kernels", __doc__)
    which = p.add_mutually_exclusive_group()
    which.add_argument(
        "--sweep", action="store_true", help="with and without relay, over many shapes"
    )
    which.add_argument("--peers", action="store_true", help="compare with kernels of JAX and torch")
    which.add_argument(
        "--products", action="store_true", help="GEMMs of few rows beside the copy rate"
    )
    which.add_argument(
        "--experts",
        action="store_true",
        help="grouped GEMMs of experts, and peers of JAX and torch",
    )
    which.add_argument(
        "--sums", action="store_true", help="sum over all devices, residual sum and norm"
    )
    which.add_argument(
        "--delta", action="store_true", help="gated delta rule: decode steps and prompts"
    )
    p.add_argument(
        "--tune",
        type=int,
        default=0,
        help="tile sizes per case of --products, best estimates first",
    )
    p.add_argument("--quantization", choices=sorted(SCHEMES), help="of the weights of --experts")
    p.add_argument("--small", action="store_true", help="few and small cases, for a CPU")
    p.add_argument("--only", default="", help="cases whose name contains this")
    p.add_argument("--backend", default="auto", choices=("auto", *NAMES), help="of the kernels")
    p.add_argument(
        "--seconds", type=float, default=480, help="start no case after this many seconds"
    )
    p.add_argument("--torch-python", default=sys.executable, help="interpreter that has torch")
    p.add_argument("--png", type=Path, help="file for the map of --sweep (default: beside --json)")
    return p


def main(arguments: list[str] | None = None) -> int:
    """Run one of them; return 1 if a result was wrong or a case failed."""
    options = parser().parse_args(arguments)
    if options.only and options.sweep:
        parser().error("--only picks cases of the table and of --peers, which --sweep has none of")
    if options.tune and not options.products:
        parser().error("--tune is for --products")
    if options.quantization and not options.experts:
        parser().error("--quantization is for --experts")
    if options.png and not options.sweep:
        parser().error("--png is the map of --sweep")
    # Before this process allocates device memory.
    torch_half = run_torch(options) if options.peers else (None, [])
    modes = ("sweep", "peers", "products", "experts", "sums", "delta")
    stem = "_".join(["kernels", *(mode for mode in modes if getattr(options, mode))])
    stem += f"_{options.quantization}" if options.quantization else ""
    if options.backend not in ("auto", "mosaic"):
        stem += f"_{options.backend}"
    path = options.json
    if path is None and not (options.only or options.small) and jax.default_backend() == "gpu":
        path = RESULTS / f"{stem}.json"
    results = ResultFile(path, {k: v for k, v in vars(options).items() if k != "torch_python"})
    if options.sweep:
        bad = run_sweep(options, results)
        _draw(results, options.png or (path and path.with_suffix(".png")))
    elif options.peers:
        bad = run_peers(options, results, *torch_half)
    elif options.products:
        bad = run_products(options, results)
    elif options.sums:
        bad = run_sums(options, results)
    elif options.delta:
        bad = run_delta(options, results)
    elif options.experts:
        bad = run_experts(options, results)
    else:
        bad = run_table(options, results)
    return 1 if bad else 0


def _draw(results: ResultFile, png: Path | None) -> None:
    if png is None or not any("speedup" in row for row in results.rows):
        return
    try:
        draw(results.record, png)
    except ImportError as error:
        print(f"no picture: {error}; python -m bench.report draws it from the saved rows")


if __name__ == "__main__":
    run("bench.kernels", main)
