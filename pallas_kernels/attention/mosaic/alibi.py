"""ALiBi: the slope of each matrix row, and the bias on a tile of scores.

Slopes come from GMEM, float32 [N], once a work tile: 4 bytes a matrix row. The bias is computed in
registers. Method: Press et al., 2022.
"""

# Pallas passes a leading context to inlined functions, which its types do not say.
# pyright: reportCallIssue=false, reportArgumentType=false

import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref

from rjax.pallas_kernels.attention.mosaic.config import WGMMA_M
from rjax.pallas_kernels.mosaic_emit import SCALAR

_ROW = plgpu.Layout.WGMMA.reduce(1)


def gather_heads(table, head0, group: int):
    """``table[min(head0 + m % group, N - 1)]`` for the 64 matrix rows m of a tile.

    table: float32 [N] GMEM; head0: int32 scalar. Returns float32 [64], one value a matrix row.
    """
    last = table.shape[0] - 1

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), SCALAR),
        return_type=plgpu.ShapeDtypeStruct((WGMMA_M,), jnp.float32, layout=_ROW),
    )
    def gather(_, ref, head_):
        index, i32 = ir.IndexType.get(), ir.IntegerType.get_signless(32)
        [start] = head_.registers.flat

        def element(m):
            member = arith.remui(arith.index_cast(i32, m), mgpu.c(group, i32))
            head = arith.minsi(arith.addi(start, member), mgpu.c(last, i32))
            return memref.load(ref, [arith.index_cast(index, head)])

        return mgpu.FragmentedArray.build((WGMMA_M,), _ROW.to_mgpu(), element)

    return gather(table, head0)


def add_alibi_bias(scores, slopes, tokens, first, positions, axis: int):
    """scores + slope * (key position - query position), for keys at ``first + tokens``.

    slopes: float32, in score units, along ``axis`` of the scores; tokens: int32, of the scores'
    shape; positions: int32, positions of the queries, in the slopes' shape or a scalar.
    """

    def broadcast(x):
        return lax.broadcast_in_dim(x, scores.shape, [axis])

    at_first = slopes * (first - positions).astype(jnp.float32)
    return scores + (broadcast(at_first) + broadcast(slopes) * tokens.astype(jnp.float32))
