"""ALiBi in the mosaic kernel: each matrix row's slope, and the bias on a tile of scores."""

# Pallas passes a leading context to inlined functions, which its types do not say.
# pyright: reportCallIssue=false, reportArgumentType=false

import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref

from pallas_kernels.attention.mosaic.config import ROWS

_SCALAR = plgpu.Layout.WG_SPLAT(())
_VECTOR = plgpu.Layout.WGMMA.reduce(1)


def gather_heads(table, head0, group: int):
    """``table[min(head0 + m % group, N - 1)]`` for the 64 rows m of a tile.

    table: float32 [N] in GMEM; head0: int32 scalar. Returns float32 [64], one value a matrix row.
    """
    last = table.shape[0] - 1

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), _SCALAR),
        return_type=plgpu.ShapeDtypeStruct((ROWS,), jnp.float32, layout=_VECTOR),
    )
    def gather(_, ref, head_):
        index, i32 = ir.IndexType.get(), ir.IntegerType.get_signless(32)
        [start] = head_.registers.flat

        def element(m):
            member = arith.remui(arith.index_cast(i32, m), mgpu.c(group, i32))
            head = arith.minsi(arith.addi(start, member), mgpu.c(last, i32))
            return memref.load(ref, [arith.index_cast(index, head)])

        return mgpu.FragmentedArray.build((ROWS,), _VECTOR.to_mgpu(), element)

    return gather(table, head0)


def add_distance(scores, slopes, tokens, first, reach, axis: int):
    """scores + slope * (key position - query position), for keys at ``first + tokens``.

    slopes: float32, in the scores' units, along ``axis`` of the scores; tokens: int32, as the
    scores; reach: int32, positions of the queries, as the slopes or one for all.
    """

    def wide(x):
        return lax.broadcast_in_dim(x, scores.shape, [axis])

    nearest = slopes * (first - reach).astype(jnp.float32)
    return scores + (wide(nearest) + wide(slopes) * tokens.astype(jnp.float32))
