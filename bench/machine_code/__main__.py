"""Machine code of the Mosaic kernels of a decode step: size and registers; needs no GPU.

    python -m bench.machine_code                             # steps of Llama-3-8B, 1 and 64 rows
    python -m bench.machine_code --shapes qwen2.5-3b --batch 64 --ptx FOLDER
    python -m bench.machine_code --quantization int4
    python -m bench.machine_code --relocatable               # as jax 0.12 compiles them

For each kernel: calls per step, bytes of code, registers per thread, bytes of register spills,
performance notes of ptxas (C7513, C7520: wgmma are serialised), and the number of loops that
overwrite the left operand of a wgmma. The last must be 0 for attention (it is a bug of ptxas;
bench/kernels/README.md); GEMMs of few-bit weights make their left operand anew for each product.
Versions of ptxas differ: give the one of the machine that runs the kernels. Jax 0.12 has nvJitLink
in place of ptxas, which makes relocatable objects and therefore ignores setmaxnreg (note C7504):
kernels that need it then spill registers.

Needs the CUDA plugin of JAX and ptxas (``pip install -e '.[cuda13]'``, or ``--plugin`` and
``--ptxas``), and a C compiler. Lost operands are found with nvdisasm (from the extra triton, or
``--nvdisasm``); without it their column is empty.
"""

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any

from tqdm import tqdm

from bench.command_line import command_parser, keep, run
from bench.decode_step.roofline import DecodeCase
from bench.machine_code.assembler import assembled, find_tools, version
from bench.machine_code.lowered_step import kernels_of, lowered_step
from rjax.benchmarks.model_shapes import SHAPES
from rjax.benchmarks.records import record
from rjax.cli.values import whole, wholes
from rjax.errors import InvalidConfigError
from rjax.models.schemes import ON_LOAD

COLUMNS = {
    "model": "model shapes",
    "batch": "rows",
    "kernel": "kernel",
    "calls": "calls per step",
    "code_bytes": "code, bytes",
    "registers": "registers",
    "spilled_bytes": "spilled, bytes",
    "lost_operands": "lost operands",
    "notes": "notes",
}


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = command_parser("bench.machine_code", __doc__)
    p.add_argument("--shapes", choices=sorted(SHAPES), default="llama-3-8b", help="of the model")
    p.add_argument("--batch", type=wholes(1), default=[1, 64], help="rows of a step, with commas")
    p.add_argument("--shared", type=whole(0), default=2048, help="tokens that all rows share")
    p.add_argument("--own", type=whole(1), default=256, help="further tokens of each row")
    p.add_argument("--quantization", choices=sorted(ON_LOAD), help="of the weights")
    p.add_argument("--plugin", type=Path, help="xla_cuda_plugin.so, where it is not installed")
    p.add_argument("--ptxas", type=Path, help="the assembler, where it is not installed")
    p.add_argument("--nvdisasm", type=Path, help="the disassembler, where it is not installed")
    p.add_argument("--relocatable", action="store_true", help="compile as nvJitLink does")
    p.add_argument("--ptx", type=Path, help="folder to write each kernel's PTX to")
    return p


def main(arguments: list[str] | None = None) -> int:
    """Assemble, print and save."""
    options = parser().parse_args(arguments)
    try:
        found = _measure(options)
    except (FileNotFoundError, InvalidConfigError, RuntimeError) as error:
        print(f"bench.machine_code: {error}", file=sys.stderr)
        return 1
    keep(found, COLUMNS, options.json, "machine_code")
    return 0


def _measure(options: argparse.Namespace) -> dict[str, Any]:
    tools = find_tools(options.plugin, options.ptxas, options.nvdisasm)
    tools = dataclasses.replace(tools, relocatable=options.relocatable)
    own = ("plugin", "ptxas", "nvdisasm", "ptx")
    settings = {k: v for k, v in vars(options).items() if k not in own}
    found = record("bench.machine_code", [], settings, assembler=version(tools))
    for batch in options.batch:
        case = DecodeCase(batch, options.shared, options.own)
        step = lowered_step(options.shapes, case, options.quantization)
        calls, modules = zip(*kernels_of(step), strict=True)
        bar = tqdm(modules, desc=f"{batch} rows", disable=options.quiet)
        for number, (said, ptx) in enumerate(assembled(bar, tools)):
            row = {"model": options.shapes, "batch": batch, "calls": calls[number]}
            found["rows"].append(row | said)
            if options.ptx is not None:
                options.ptx.mkdir(parents=True, exist_ok=True)
                (options.ptx / f"{batch}_{number}_{said['kernel']}.ptx").write_text(ptx)
    return found


if __name__ == "__main__":
    run("bench.machine_code", main)
