"""Which copies have the evict_first policy, in lowered kernels."""

import collections
import functools

import batches
import jax
import jax.numpy as jnp
import pytest
from jax._src.interpreters import mlir
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import nvvm

from bench.machine_code.lowered_step import kernels_of
from rjax.pallas_kernels.attention import mosaic
from rjax.pallas_kernels.attention.spec import AttentionSpec
from rjax.pallas_kernels.gemm.gate_up_gemm import gate_up_gemm
from rjax.pallas_kernels.gemm.split_k_gemm import split_k_gemm
from rjax.pallas_kernels.mosaic.tma_copy import evict_first

_COPY = nvvm.CpAsyncBulkTensorGlobalToSharedClusterOp.OPERATION_NAME
_DESCRIPTOR, _HINT = 1, 6  # operand segments of a copy
_LINE, _LINE_DESCRIPTOR = "cp.async.bulk.tensor", 2  # of PTX, with jax 0.12, and its operand
MANY_ROWS = batches.Batch(shared=128, members=(2,), own=(200, 40), queries=(190, 2))


def hints(function, *arguments):
    """Of each descriptor that the first kernel copies by: the number of hints of each copy."""
    lowered = jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",))
    module = kernels_of(lowered)[0][1]
    found = collections.defaultdict(list)

    def visit(op):
        if op.operation.name.endswith(_COPY):
            segments = list(ir.DenseI32ArrayAttr(op.attributes["operandSegmentSizes"]))
            found[op.operands[_DESCRIPTOR]].append(segments[_HINT])
        line = op.attributes["asm_string"].value if "asm_string" in op.attributes else ""
        if _LINE in line and ".mbarrier::" in line:
            found[op.operands[_LINE_DESCRIPTOR]].append(int(".L2::cache_hint" in line))
        for inner in (x for region in op.regions for block in region.blocks for x in block):
            visit(inner)

    with mlir.make_ir_context() as context:
        context.allow_unregistered_dialects = True
        parsed = ir.Module.parse(module)
        visit(parsed.operation)
        return sorted(sorted(copies) for copies in found.values())


def shapes(*sizes):
    return [jax.ShapeDtypeStruct(size, jnp.bfloat16) for size in sizes]


@pytest.mark.sample(1)
@pytest.mark.parametrize("rows", [8, 128])
def test_weights_do_and_rows_do_not(rows):
    for product, weights in ((split_k_gemm, (256, 256)), (gate_up_gemm, (256, 2, 256))):
        found = hints(product, *shapes((rows, 256), weights))
        assert [set(copies) for copies in found] == [{0}, {1}]


# One descriptor a work list copies queries. Keys and values have one for whole tiles, which
# cooperative work tiles use too, and three for parts of a last tile. Each kind of work tile has two
# copies by each descriptor.
@pytest.mark.sample(0, 1)
@pytest.mark.parametrize(
    ("tile_rows", "batch", "pools"),
    [
        pytest.param(8, batches.RELAY, [[1, 1]] * 8, marks=pytest.mark.slow),
        (32, batches.RELAY, [[1, 1]] * 6 + [[1, 1, 1, 1]] * 2),
        (8, MANY_ROWS, [[1, 1]] * 8),
        (32, MANY_ROWS, [[0, 0, 1, 1]] * 2 + [[1, 1]] * 6),
    ],
)
def test_kv_does_except_cooperative_tiles_in_steps_of_many_rows(tile_rows, batch, pools):
    a = batches.make_arrays(
        batch,
        N=8,
        K=2,
        H=64,
        S=64,
        tile_rows=tile_rows,
        split=128,
        sharing="on",
        dtype=jnp.bfloat16,
    )
    run = functools.partial(mosaic.paged_attention, spec=AttentionSpec(0.1))
    leaves, tree = jax.tree.flatten((a.q, a.k_pages, a.v_pages, a.page_table, a.positions, a.plan))
    found = hints(lambda *leaves: run(*tree.unflatten(leaves)), *leaves)
    assert [copies for copies in found if any(copies)] == pools
    assert [copies for copies in found if not any(copies)] == [[0, 0]] * 2


def test_it_follows_a_copy():
    call = plgpu.kernel(
        lambda out: evict_first(),
        out_type=jax.ShapeDtypeStruct((128,), jnp.float32),
        grid=(1,),
        grid_names=("x",),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )
    with pytest.raises(AssertionError, match="no copy"):
        jax.jit(call).trace().lower(lowering_platforms=("cuda",))
