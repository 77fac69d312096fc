"""Integer weights from shared memory to the registers from which wgmma reads its left operand."""

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu


def load_upcast(tile, first: int, columns: int, dtype):
    """Columns ``first`` to ``first + columns`` of a tile, in ``dtype`` and WGMMA layout.

    tile: int4 or int8 [64, X] SMEM, tiled and swizzled. A thread loads 32 bits at once; the packed
    values are exchanged between the threads of a quad before they are converted.
    """
    int4 = tile.dtype == jnp.int4
    layout = plgpu.Layout.WGMMA_UPCAST_4X if int4 else plgpu.Layout.WGMMA_UPCAST_2X
    value = plgpu.load(tile, layout=layout)[:, first : first + columns]
    return plgpu.layout_cast(value, plgpu.Layout.WGMMA).astype(dtype)
