"""A decode step lowered for CUDA without a GPU, and its Mosaic kernels."""

import collections
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxlib.mlir import ir

from bench.decode_step.roofline import DecodeCase
from bench.decode_step.step_bench import step_shape
from rjax.benchmarks.model_shapes import SHAPES
from rjax.models import config_from_dict, init_model
from rjax.models.loading.config import with_quantization
from rjax.models.sharding import single_device_mesh
from rjax.sampling import init_state
from rjax.worker.backend import choose_backend
from rjax.worker.step.features import StepFeatures
from rjax.worker.step.layout import PackedLayout
from rjax.worker.step.program import compile_step
from rjax.worker.step.state import StepState

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
    if config.linear is not None:
        raise SystemExit(f"--model: {config.architecture} has linear attention; choose another")
    shape = step_shape(case, backend, config, page_size=page_size, relay="auto")
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
