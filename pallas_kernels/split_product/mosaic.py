"""Products of few rows on Hopper, the depth cut in parts, so that all multiprocessors stream though
the columns alone make too few tiles (``streamed_product``).

Nobody waits for a kernel that sums the parts: whoever reads the product next sums them
(``residual_norm``, ``kv_write``). Bytes moved beside the weights and rows: X * T * E * 4 of parts.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from pallas_kernels.mosaic_emit import multiprocessors
from pallas_kernels.one_row import MergedRow, NormedRow, RowSource
from pallas_kernels.streamed_product import Cut, ring_slots, store_rows, streamed_product

_MOST_SPLITS = 8
_FEW_ROWS = 16
_LONG_CHUNK_ROWS = 64  # beyond, a run of the whole depth is faster in shorter chunks
_SHARED_BYTES = 220 << 10


def split_product(
    h: Float[Array, "T D"], w: Float[Array, "D E"], *, splits: int | None = None
) -> Float32[Array, "X T E"]:
    """Parts, float32, that sum to h @ w; the same ones whatever the run.

    Args:
        h, w: bfloat16 or float16, both alike; T is 1, 8, 16, 32, 64 or 128, D and E multiples of
            64, D of 128 where T is 1.
        splits: X; None for as many as fill the multiprocessors, at most 8.

    Raises:
        ValueError: a shape or dtype the kernel does not take.
    """
    return _split(h, w, splits)[0]


def merged_product(
    out: Float[Array, "1 N H"],
    part: Float[Array, "X N H"],
    part_lse: Float[Array, "X N"],
    merge_indptr: Int[Array, "2"],
    w: Float[Array, "D E"],
) -> Float32[Array, "Y 1 E"]:
    """``split_product`` of one row that ``relay_fusion.mosaic.merge_in_place`` would make of these
    arguments of it; D is N * H."""
    return _split(MergedRow(out, part, part_lse, merge_indptr), w, None)[0]


def normed_product(
    x: Float[Array, "1 D"],
    update: Float[Array, "1 D"] | Float[Array, "X 1 D"],
    weight: Float[Array, " D"],
    eps: float,
    w: Float[Array, "D E"],
) -> tuple[Float[Array, "1 D"], Float32[Array, "Y 1 E"]]:
    """(x + update, ``split_product`` of its RMSNorm); arguments as in ``residual_norm``."""
    parts, total = _split(NormedRow(x, update, weight, eps), w, None)
    return total, parts


def run(depth: int, columns: int) -> int:
    """Columns of a row that a program takes, where there is one row."""
    cut = _choose_cut(1, depth, columns, None)
    return -(-depth // cut.chunk // cut.splits) * cut.chunk


def _split(
    h: Float[Array, "T D"] | RowSource, w: Float[Array, "D E"], splits: int | None
) -> tuple[Array, ...]:
    (T, D), E = h.shape, w.shape[1]
    cut = _choose_cut(T, D, E, splits)

    def finish(out, totals, part, row, column):
        store_rows(out.at[part], totals[0], row, column)

    shape = jax.ShapeDtypeStruct((cut.splits, T, E), jnp.float32)
    return streamed_product("split_product", h, w[:, None], cut, shape, finish)


def _choose_cut(T: int, depth: int, columns: int, splits: int | None) -> Cut:
    """The cut into the most programs that run at once.

    Of two that make as many: of few rows wide tiles, of many the fewest parts to write and sum.
    """
    cuts = []
    for n in (128, 64):
        tiles = max(1, columns // n)
        # One row lies in groups of 64 columns.
        chunk = 64 if n == 128 or depth % 128 or T == 1 else 128
        most = min(_MOST_SPLITS, max(1, depth // chunk))
        own = splits or max(1, min(most, multiprocessors() // tiles))
        if T > _LONG_CHUNK_ROWS and own == 1:
            chunk = 64
        ring = ring_slots(T, depth, columns=n, chunk=chunk, splits=own, shared_bytes=_SHARED_BYTES)
        cuts.append(Cut(n, chunk, own, ring))
    fitting = [cut for cut in cuts if columns % cut.columns == 0] or cuts
    fewest = -1 if T > _FEW_ROWS else 1
    return max(fitting, key=lambda cut: (columns // cut.columns * cut.splits, fewest * cut.splits))
