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
import collections
import dataclasses
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxlib.mlir import ir
from tqdm import tqdm

from bench.assembler import assembled, find_tools, version
from bench.command_line import command_parser, keep, run
from bench.decode_step import step_shape
from bench.step_roofline import DecodeCase
from rjax.benchmarks.model_shapes import SHAPES
from rjax.benchmarks.records import record
from rjax.cli.values import whole, wholes
from rjax.errors import InvalidConfigError
from rjax.models import config_from_dict, init_model
from rjax.models.loading.config import with_quantization
from rjax.models.schemes import ON_LOAD
from rjax.models.sharding import single_device_mesh
from rjax.sampling import init_state
from rjax.worker.backend import choose_backend
from rjax.worker.step.features import StepFeatures
from rjax.worker.step.layout import PackedLayout
from rjax.worker.step.program import compile_step
from rjax.worker.step.state import StepState

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
_PAGE = 64  # tokens


def lowered_step(
    model: str | dict[str, Any],
    case: DecodeCase,
    quantization: str | None = None,
    without: str | None = None,
    page_size: int = _PAGE,
) -> Any:
    """The decode step of a model, lowered for a Hopper GPU without running it.

    Args:
        model: a name of ``SHAPES``, or a config.json.
        case: rows of the step and their contexts.
        quantization: of the weights.
        without: a kernel that the step must do without.
        page_size: tokens a page.
    """
    config = config_from_dict(SHAPES[model] if isinstance(model, str) else model)
    config = with_quantization(config, quantization)
    dtype = jnp.dtype(config.dtype)
    backend = choose_backend(
        "auto",
        platform="gpu",
        compute_capability=9.0,
        model=config,
        dtype=dtype,
        page_size=page_size,
    )
    if without is not None:
        backend = dataclasses.replace(backend, dispatcher=backend.dispatcher.without(without))
    shape = step_shape(
        case, backend, num_layers=config.num_layers, page_size=page_size, relay="auto"
    )
    graph, weights = nnx.split(nnx.eval_shape(lambda: init_model(config, dtype=dtype)))
    leaves, tree = jax.tree.flatten(weights)
    layout, features = PackedLayout(shape), StepFeatures("greedy")
    step: Any = compile_step(graph, tree, layout, features, backend, single_device_mesh())
    pages = case.shared // page_size + case.batch * shape.table_pages
    pool = jax.ShapeDtypeStruct((pages, config.num_kv_heads, page_size, config.head_dim), dtype)
    sampling = jax.eval_shape(lambda: init_state(case.batch, config.vocab_size))
    tokens = jax.ShapeDtypeStruct((case.batch,), jnp.int32)
    pools = [pool] * config.num_layers
    state = StepState(pools, pools, sampling, tokens)  # pyright: ignore[reportArgumentType]
    packed = jax.ShapeDtypeStruct((layout.size,), jnp.int32)
    return step.trace(leaves, state, packed).lower(lowering_platforms=("cuda",))


def kernels_of(lowered: Any) -> list[tuple[int, bytes]]:
    """(calls, module) of each Mosaic kernel of a lowered program: MLIR as the plugin takes it."""
    functions = {f.sym_name.value: f for f in lowered.compiler_ir().body.operations}
    found: collections.Counter[bytes] = collections.Counter()

    def visit(op: Any, calls: int) -> None:
        match op.operation.name:
            case "func.call":
                visit(functions[ir.FlatSymbolRefAttr(op.attributes["callee"]).value], calls)
            case "stablehlo.custom_call" if "mosaic_gpu" in str(op.attributes["call_target_name"]):
                config = ir.DictAttr(op.attributes["mhlo.backend_config"])
                found[bytes(ir.StringAttr(config["module"]).value_bytes)] += calls
        for region in op.regions:
            for inner in (x for block in region.blocks for x in block.operations):
                visit(inner, calls)

    visit(functions["main"], 1)
    return [(calls, module) for module, calls in found.items()]


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
