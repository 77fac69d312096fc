"""Grouped GEMM on Hopper (Mosaic GPU): persistent CTAs take work items from a list on the device.

An item is a tile of R rows of one expert and a tile of columns of that expert's W matrices. CTA c
of C takes the items c, c + C, ...: the list is as long as the routing makes it, the launch is not.
A producer warpgroup copies blocks of weights and rows (TMA) through a pipeline in shared memory,
which runs on from one item to the next: while the consumers finish an item, the weights of the
next one arrive. Consumer warpgroups multiply them (``left_operand``), each 64 columns of every
matrix, and pass the sums to the epilogue.

The weights are the left operand (64 columns) and the rows the right one, so that few rows are few
columns of the instruction (swap-AB). Items of an expert follow each other, its columns first, so
that weights that several tiles of rows need are in the L2 cache.
"""

# Pallas passes a leading context to inlined functions, which its types do not say.
# pyright: reportCallIssue=false, reportArgumentType=false, reportAbstractUsage=false

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from rjax.pallas_kernels.experts.config import WGMMA_M, GroupedConfig
from rjax.pallas_kernels.experts.left_operand import Item, LeftOperand, Stages
from rjax.pallas_kernels.experts.work_list import WorkList
from rjax.pallas_kernels.mosaic.emit import begin_kernel

_PRODUCER_REGISTERS, _CONSUMER_REGISTERS = 40, {2: 232, 3: 152}


def grouped_gemm(
    name: str,
    x: Float[Array, "X D"],
    w: LeftOperand,
    work: WorkList,
    config: GroupedConfig,
    out: jax.ShapeDtypeStruct,
    epilogue: Callable[..., None],
    operands: tuple[Array, ...] = (),
    prologue: Callable[..., Any] | None = None,
) -> Array:
    """Compute x @ w[expert of the row, :, i] for all i; return the output of the epilogue.

    Args:
        name: kernel name in profiles.
        x: the rows of all slots, bfloat16 or float16; those of empty slots may be any numbers. A
            single row is that of the first slot of every tile.
        w: the weights, for rows of x's dtype; D is a multiple of ``block_k``, E of
            64 * ``consumers``.
        work: the tiles.
        config: tile sizes.
        out: shape and dtype of the output.
        epilogue: called with (operands in GMEM, output in GMEM, W sums, each float32 [64, R] in
            WGMMA layout: columns by rows; expert, first slot, first column); stores the sums.
        operands: further arrays that the epilogue reads.
        prologue: called with (operands in GMEM, first slot) before the products of an item, so that
            its loads are over when they are; the epilogue gets its result in place of the operands.
    """
    R, (_, D, _, E) = work.tile_rows, w.shape
    consumers, block_k, stages = config.consumers, config.block_k, config.num_stages
    tile_e, blocks = config.tile_columns, D // block_k
    columns, num_arrays = E // tile_e, len(w.arrays)
    scratch = w.scratch(config)
    assert D % block_k == 0 and E % tile_e == 0, (w.shape, config)

    def kernel(x, tile_expert, num_tiles, *refs, x_smem, full, empty, **smem):
        """GMEM: x [slots, D], tile_expert [tiles], num_tiles [1], arrays of the left operand,
        operands of the epilogue, out. SMEM: x_smem [stages, R, block_k], scratch of the left
        operand. Barriers, one per stage: full, empty."""
        begin_kernel()  # which weights to read is the result of a kernel before
        weights, (*others, out_ref) = refs[:num_arrays], refs[num_arrays:]
        cta, ctas = lax.axis_index("cta"), jnp.int32(config.num_ctas)
        items = num_tiles[0] * columns
        count = jnp.maximum(lax.div(items - cta + ctas - 1, ctas), 0)
        wg = lax.axis_index("wg")

        def place(i):
            """(tile, first slot, first column) of the CTA's i-th item."""
            item = cta + i * ctas
            tile = lax.div(item, jnp.int32(columns))
            column = lax.rem(item, jnp.int32(columns)) * tile_e
            return tile, pl.multiple_of(tile * R, R), pl.multiple_of(column, tile_e)

        @pl.when(wg == consumers)
        def _producer():
            if consumers > 1:
                plgpu.set_max_registers(_PRODUCER_REGISTERS, action="decrease")

            one = None if x.shape[0] > 1 else pl.multiple_of(cta * 0, R)

            def item(i, _):
                tile, slot, column = place(i)
                own = Item(tile_expert[tile], column, 0, R)

                def load(k, _):
                    done = i * blocks + k
                    stage = lax.rem(done, jnp.int32(stages))
                    pl.when(done >= stages)(lambda: plgpu.barrier_wait(empty.at[stage]))
                    depth = pl.ds(pl.multiple_of(k * block_k, block_k), block_k)
                    w.copy(weights, smem, own, k, stage, full.at[stage], config)
                    # Rows beyond a single one are out of bounds: the copy fills them with zeros.
                    start = slot if one is None else one
                    tile_x = x.at[pl.ds(start, R), depth]
                    plgpu.copy_gmem_to_smem(tile_x, x_smem.at[stage], full.at[stage])

                lax.fori_loop(0, blocks, load, None)

            lax.fori_loop(0, count, item, None)

        @pl.when(wg < consumers)
        def _consumer():
            if consumers > 1:
                plgpu.set_max_registers(_CONSUMER_REGISTERS[consumers], action="increase")
            first = pl.multiple_of(wg * WGMMA_M, WGMMA_M) if consumers > 1 else 0

            def item(i, _):
                tile, slot, column = place(i)
                own = Item(tile_expert[tile], column, first, R)
                ready = Stages(i * blocks, blocks, stages, full, empty)
                given = others if prologue is None else prologue(others, slot)
                sums = w.sums(weights, smem, x_smem, own, ready)
                epilogue(given, out_ref, sums, own.expert, slot, own.first)

            lax.fori_loop(0, count, item, None)

    kernel.__name__ = name
    swizzled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    return plgpu.kernel(
        kernel,
        out_type=out,
        scratch_types=dict(
            x_smem=plgpu.SMEM((stages, R, block_k), x.dtype, transforms=swizzled),
            full=plgpu.Barrier(num_barriers=stages, num_arrivals=w.copies + 1),
            empty=plgpu.Barrier(num_barriers=stages, num_arrivals=consumers),
        )
        | scratch,
        grid=(config.num_ctas,),
        grid_names=("cta",),
        num_threads=consumers + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            unsafe_no_auto_barriers=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
    )(x, work.tile_expert, work.num_tiles, *w.arrays, *operands)
