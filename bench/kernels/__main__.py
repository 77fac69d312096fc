"""``python -m bench.kernels``: check, then time, the attention kernels on this machine's GPU.

Prints a table with the least possible time beside each figure and writes JSON under bench/results/.
"""

import argparse
import dataclasses
import datetime
import json
import pathlib
import sys

import jax
from jaxlib.version import __version__ as jaxlib_version

from bench.kernels.run_case import Result, run_case
from bench.kernels.table import table_cases
from bench.kernels.timing import copy_rate, matmul_rate
from pallas_kernels.attention import mosaic

_RESULTS = pathlib.Path(__file__).resolve().parents[1] / "results"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.kernels", description=__doc__)
    parser.add_argument("--only", default="", help="run cases whose name contains this")
    parser.add_argument("--out", type=pathlib.Path, default=_RESULTS / "kernels.json")
    options = parser.parse_args()
    if jax.default_backend() != "gpu":
        print("bench.kernels needs an NVIDIA GPU; JAX found none", file=sys.stderr)
        return 2
    rates = (copy_rate(), matmul_rate())
    device = jax.devices()[0].device_kind
    print(f"{device}: copy {rates[0] / 1e12:.2f} TB/s, bf16 matmul {rates[1] / 1e12:.0f} TFLOP/s")
    print(f"{'case':34s} {'variant':26s} {'us':>9s} {'floor':>9s} {'ratio':>6s} {'target':>8s}")
    results: list[Result] = []
    wrong: list[Result] = []
    pack = jax.jit(mosaic.pack_plan, static_argnums=2)
    for case in table_cases():
        if options.only not in case.name:
            continue
        variant = f"split {case.split}, rows {case.tile_rows}"
        result = run_case(case, mosaic.paged_attention, variant, rates, pack=pack)
        (results if result.correct else wrong).append(result)
        print(result.line(), flush=True)
        _write(options.out, device, rates, results, wrong)
    if wrong:
        names = ", ".join(result.case for result in wrong)
        print(f"wrong results, not timed: {names}", file=sys.stderr)
    return 1 if wrong else 0


def _write(
    path: pathlib.Path,
    device: str,
    rates: tuple[float, float],
    results: list[Result],
    wrong: list[Result],
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {
        "device": device,
        "jax": jax.__version__,
        "jaxlib": jaxlib_version,
        "date": datetime.date.today().isoformat(),
        "command": "python -m bench.kernels",
        "copy_bytes_per_s": rates[0],
        "matmul_flop_per_s": rates[1],
        "results": [dataclasses.asdict(result) for result in results],
        "wrong": [result.case for result in wrong],
    }
    path.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
