"""Streams the weights of a quantised GEMM on Hopper (Mosaic GPU), out^T = W h^T.

One CTA computes 64 outputs of W matrices for each consumer warpgroup, for one tile of rows, over
one split of the depth. A producer warpgroup copies blocks of weights and rows (TMA) through a
pipeline in shared memory; the consumers multiply them (``products``) and pass float32 sums to the
epilogue. The first weights may arrive while the kernels before still run (`begin_kernel`).

Bytes moved: the weights once from device memory, with the L2 policy evict_first if there is one
tile of rows; their scales once; weights and rows once per CTA, from the L2 cache; the output of the
epilogue.
"""

# Pallas passes a leading context to inlined functions, which its types do not say.
# pyright: reportCallIssue=false, reportArgumentType=false, reportAbstractUsage=false

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref, vector
from jaxtyping import Array, Float

from rjax.pallas_kernels.gemm.few_bits.config import (
    FEW_ROWS,
    MAX_TILE_ROWS,
    PRODUCER_REGISTERS,
    WGMMA_M,
    GemmConfig,
    GemmShape,
    consumer_registers,
)
from rjax.pallas_kernels.gemm.few_bits.products import (
    multiply_fp8,
    multiply_scaled,
    multiply_upcast,
    zeros,
)
from rjax.pallas_kernels.gemm.few_bits.quantised_rows import GROUP, QuantisedRows, padded_rows
from rjax.pallas_kernels.gemm.few_bits.scaled_weight import ScaledWeight
from rjax.pallas_kernels.gemm.few_bits.scales import Scales
from rjax.pallas_kernels.gemm.gemv_row import RowSource, SmemRow
from rjax.pallas_kernels.mosaic.emit import SCALAR, begin_kernel
from rjax.pallas_kernels.mosaic.pipeline import Pipeline
from rjax.pallas_kernels.mosaic.tma_copy import evict_first

_ACC = plgpu.WGMMAAccumulatorRef


def stream_gemm(
    name: str,
    h: Float[Array, "T E"] | QuantisedRows | RowSource,
    weight: ScaledWeight,
    config: GemmConfig,
    out: jax.ShapeDtypeStruct,
    epilogue: Callable[..., None],
) -> tuple[Array, ...]:
    """Compute the W products h @ weight[i].T; return the output of the epilogue and of a RowSource.

    Args:
        name: kernel name in profiles.
        h: 16-bit, or QuantisedRows for fp8 weights. A RowSource computes one row in the kernel.
        weight, config: see ``quantised_gemm.refusal``.
        out: shape and dtype of the output.
        epilogue: called with (output in GMEM, sums, index of the split, first output, first row);
            stores the existing rows (``store_transposed``). The sums are float32 [64, R] in WGMMA
            layout, outputs by rows: one for each matrix, or for each half of one matrix's outputs.
    """
    source = h if isinstance(h, RowSource) else None
    rows = h.values if isinstance(h, QuantisedRows) else h
    row_dtype = _row_dtype(h)
    shape, (T, E) = gemm_shape(h, weight), h.shape
    weight = weight.split(shape.matrices)
    W, R, stages = shape.matrices, shape.rows, config.num_stages
    consumers, groups = config.consumers, config.stage_groups
    block_k, tile_x, warpgroups = config.block_k, consumers * WGMMA_M, consumers * groups
    # A warpgroup counts phases of the barriers that it waits for: each needs stages of its own.
    assert stages % groups == 0
    multiply = multiply_fp8
    if not weight.is_fp8:
        multiply = multiply_scaled if shape.sums_in_place else multiply_upcast
        multiply = functools.partial(multiply, interleaved=weight.interleaved)
    inputs = [rows] if source is None else list(source.operands)
    operands = [*inputs, weight.values, weight.scale]
    if weight.zero_points is not None:
        operands.append(weight.zero_points)
    if isinstance(h, QuantisedRows):
        operands.append(h.scale)
    grouped = isinstance(h, QuantisedRows) and h.scale.shape[0] > 1
    assert not grouped or block_k == GROUP
    scale_rows = -(-R // 32) * 32  # a copy has a multiple of 128 bytes
    others = () if source is None else source.results
    most_columns = -(-(E // block_k) // config.split_k) * block_k
    row_transforms = _transforms(row_dtype, 128 // row_dtype.itemsize)

    def kernel(
        *refs,
        x_smem,
        w_smem,
        full,
        empty,
        scale_smem: Any = None,
        filled: Any = None,
        scratch: Any = None,
        row_scale: Any = None,
        sums_smem: Any = None,
        summed: Any = None,
    ):
        """GMEM: x [T, E] or the operands of the row source, w [W, X, E], scale, zero points if
        there are any, scale of the rows if they are quantised, out, other results. SMEM: x_smem
        [stages, R, block_k] or the row [R, columns], w_smem [stages, W, 64 * consumers, block_k],
        scale_smem [stages, at least R] of grouped rows, scratch [4], row_scale [1, R] of a
        quantised row source, sums_smem [groups - 1, consumers, W, 64, R]. Barriers, one per stage:
        full, empty; filled: the row is there; summed: all sums but those of the first group."""
        begin_kernel(weight.is_early)
        given, [w, scale, *refs] = refs[: len(inputs)], refs[len(inputs) :]
        out_ref, *results = refs[len(refs) - 1 - len(others) :]
        refs = refs[: len(refs) - 1 - len(others)]
        zero_points = refs.pop(0) if weight.zero_points is not None else None
        x_scale = refs.pop() if refs else row_scale
        first = pl.multiple_of(lax.axis_index("tile") * tile_x, tile_x)
        split = lax.axis_index("split")
        # The last tile overlaps the one before, where rows are not a multiple of R.
        last_row = jnp.int32(padded_rows(T) - R)
        row = pl.multiple_of(jnp.minimum(lax.axis_index("rows") * R, last_row), 8)
        all_blocks = jnp.int32(E // block_k)
        start = lax.div(split * all_blocks, jnp.int32(config.split_k))
        count = lax.div((split + 1) * all_blocks, jnp.int32(config.split_k)) - start
        wg = lax.axis_index("wg")
        pipeline = Pipeline(full, empty, stages)

        @pl.when(wg == warpgroups)
        def _producer():
            if warpgroups > 1:
                plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")

            def depth_of(i):
                return pl.ds(pl.multiple_of((start + i) * block_k, block_k), block_k)

            def load_weights(i, stage):
                for which in range(W):
                    tile = w.at[which, pl.ds(first, tile_x), depth_of(i)]
                    plgpu.copy_gmem_to_smem(tile, w_smem.at[stage, which], full.at[stage])
                    if shape.row_tiles == 1:
                        evict_first()

            def load_rows(i, stage):
                if source is not None:
                    return
                # Rows beyond T are out of bounds: the copy fills them with zeros.
                x_tile = given[0].at[pl.ds(row, R), depth_of(i)]
                plgpu.copy_gmem_to_smem(x_tile, x_smem.at[stage], full.at[stage])
                if grouped:
                    of_tile = x_scale.at[start + i, pl.ds(row, scale_rows)]
                    plgpu.copy_gmem_to_smem(of_tile, scale_smem.at[stage], full.at[stage])

            pipeline.fill(count, load_weights, load_rows, early=weight.is_early)

        @pl.when(wg < warpgroups)
        def _consumer():
            if warpgroups > 1:
                plgpu.set_max_registers(consumer_registers(warpgroups), action="increase")
            consumer = lax.rem(wg, jnp.int32(consumers))
            group = lax.div(wg, jnp.int32(consumers))
            own = pl.multiple_of(consumer * WGMMA_M, WGMMA_M) if consumers > 1 else 0
            mine = pl.ds(own, WGMMA_M)
            output = pl.multiple_of(first + own, WGMMA_M)
            scales = Scales(
                weight=scale,
                zero_points=zero_points,
                rows=None if grouped else x_scale,
                group_rows=scale_smem,
                block=weight.block,
                first=output,
                shape=(WGMMA_M, R),
                row=row,
            )

            scales.prefetch(start * block_k, most_columns)
            last_scales = scales.load_last()
            if weight.is_early:
                plgpu.griddepcontrol_wait()
            if source is not None:
                columns = (start * block_k, count * block_k, most_columns, E)
                smem_row = SmemRow(x_smem, row_transforms, *columns, row_scale)
                is_first = (first == 0) & (split == 0)

                fill = source.fill

                @pl.when(wg == 0)
                def _fill():
                    fill(given, results, smem_row, scratch, is_first)
                    plgpu.commit_smem()
                    plgpu.barrier_arrive(filled)

                plgpu.barrier_wait(filled)

            def x_tile_of(i, stage):
                if source is None:
                    return x_smem.at[stage]
                return x_smem.at[:, pl.ds(pl.multiple_of(i * block_k, block_k), block_k)]

            def load_scales(i):
                return scales.load((start + i) * block_k, block_k)

            def step(j, totals, loaded):
                i = j * groups + group
                ahead = load_scales(jnp.minimum(i + groups, count - 1))
                stage = pipeline.wait(i)
                tiles = [w_smem.at[stage, which, mine] for which in range(W)]
                now = scales.of_stage(loaded, stage)
                totals = multiply(totals, tiles, x_tile_of(i, stage), scales, now)
                pipeline.release(stage)
                return totals, ahead

            # Group g takes every stage whose number is g modulo their number.
            steps = lax.div(count - group + (groups - 1), jnp.int32(groups))

            def summed_in_place(*accs):
                lax.fori_loop(0, steps, lambda j, loaded: step(j, accs, loaded)[1], first_scales)
                return tuple(acc[...] for acc in accs)

            first_scales = load_scales(jnp.minimum(group, count - 1))
            if shape.sums_in_place:
                totals = pl.run_scoped(summed_in_place, *[_ACC(scales.shape, jnp.float32)] * W)
            else:
                carry = (zeros(scales.shape),) * W, first_scales
                totals, _ = lax.fori_loop(0, steps, lambda j, carry: step(j, *carry), carry)

            def finish(totals):
                totals = scales.apply_last(totals, last_scales)
                epilogue(out_ref, totals, split, output, row)

            if groups == 1:
                finish(totals)
                return

            @pl.when(group > 0)
            def _():
                for which, total in enumerate(totals):
                    sums_smem[group - 1, consumer, which] = total
                plgpu.barrier_arrive(summed)

            @pl.when(group == 0)
            def _():
                plgpu.barrier_wait(summed)
                found = list(totals)
                for other in range(groups - 1):
                    for which in range(W):
                        ref = sums_smem.at[other, consumer, which]
                        added = plgpu.load(ref, layout=plgpu.Layout.WGMMA, optimized=False)
                        found[which] = found[which] + added
                finish(tuple(found))

    kernel.__name__ = name
    scratch = {
        "x_smem": _stage_memory((stages, R, block_k), row_dtype),
        "w_smem": _stage_memory((stages, W, tile_x, block_k), weight.values.dtype),
        "full": plgpu.Barrier(
            num_barriers=stages, num_arrivals=W + (source is None) + bool(grouped)
        ),
        "empty": plgpu.Barrier(num_barriers=stages, num_arrivals=consumers),
    }
    if grouped:
        scratch["scale_smem"] = plgpu.SMEM((stages, scale_rows), jnp.float32)
    if groups > 1:
        sums = (groups - 1, consumers, W, WGMMA_M, R)
        scratch["sums_smem"] = plgpu.SMEM(sums, jnp.float32)
        scratch["summed"] = plgpu.Barrier(num_arrivals=(groups - 1) * consumers)
    if source is not None:
        scratch["x_smem"] = plgpu.SMEM((R, most_columns), row_dtype, transforms=row_transforms)
        scratch["filled"] = plgpu.Barrier()
        scratch["scratch"] = plgpu.SMEM((4,), jnp.float32)
        if row_dtype != source.dtype:
            scratch["row_scale"] = plgpu.SMEM((1, R), jnp.float32)
    return plgpu.kernel(
        kernel,
        out_type=(out, *others),
        scratch_types=scratch,
        # The tiles of rows that read the same weights run side by side.
        grid=(shape.outputs // tile_x, config.split_k, shape.row_tiles),
        grid_names=("tile", "split", "rows"),
        num_threads=warpgroups + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            unsafe_no_auto_barriers=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
    )(*operands)


def _stage_memory(shape: tuple[int, ...], dtype):
    return plgpu.SMEM(shape, dtype, transforms=_transforms(dtype, shape[-1]))


def _transforms(dtype, columns: int):
    """The widest swizzle for this number of columns."""
    bits = 4 if dtype == jnp.int4 else jnp.dtype(dtype).itemsize * 8
    swizzle = min(128, columns * bits // 8)
    return plgpu.TilingTransform((8, swizzle * 8 // bits)), plgpu.SwizzleTransform(swizzle)


def gemm_shape(
    h: Float[Array, "T E"] | QuantisedRows | RowSource, weight: ScaledWeight
) -> GemmShape:
    """The shape that a config is chosen for; shapes and dtypes of the arguments are enough."""
    W, X, E = weight.values.shape
    # A warpgroup reads each tile of many rows for 128 outputs: two matrices, or halves of one.
    if h.shape[0] > FEW_ROWS and weight.can_split(2, WGMMA_M):
        W, X = 2, X // 2
    rows = padded_rows(h.shape[0])
    row_tiles = -(-rows // MAX_TILE_ROWS)
    return GemmShape(
        rows=padded_rows(-(-rows // row_tiles)),
        row_tiles=row_tiles,
        matrices=W,
        outputs=X,
        depth=E,
        bits=weight.bits,
        row_bits=8 * _row_dtype(h).itemsize,
        interleaved=weight.interleaved,
        resident_row=isinstance(h, RowSource),
        shares_sm=not isinstance(h, RowSource) or h.shares_sm,
        row_read_bytes=h.read_bytes if isinstance(h, RowSource) else 0,
    )


def _row_dtype(h: Float[Array, "T E"] | QuantisedRows | RowSource) -> jnp.dtype:
    """Dtype of the rows in shared memory."""
    if isinstance(h, RowSource):
        return h.smem_dtype
    return jnp.dtype(h.values.dtype if isinstance(h, QuantisedRows) else h.dtype)


def store_transposed(ref, value, first, first_row) -> None:
    """``ref[first_row + row, first + output] = value[output, row]`` for rows below T.

    ref: [T, X] in GMEM; value: [64, R] in WGMMA layout, of ref's dtype; first, first_row: int32.
    Eight threads store eight consecutive outputs.
    """
    T = ref.shape[0]

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WGMMA, SCALAR, SCALAR))
    def store(_, ref_, value_, first_, first_row_):
        index = ir.IndexType.get()
        start, start_row = (
            arith.index_cast(index, each.registers.flat[0]) for each in (first_, first_row_)
        )
        indices = value_.layout.thread_idxs(value_.shape)
        for (output, row), register in zip(indices, value_.registers.flat, strict=True):
            [vector_size] = register.type.shape
            for i in range(vector_size):
                at = arith.addi(arith.addi(start_row, row), mgpu.c(i, index))
                element = vector.extract(register, [], [i])
                exists = arith.cmpi(arith.CmpIPredicate.ult, at, mgpu.c(T, index))
                with mgpu.when(exists):
                    memref.store(element, ref_, [at, arith.addi(start, output)])

    store(ref, value, first, first_row)
