"""Split-K GEMM of few rows on Hopper (``skinny_gemm``), for matrices with fewer column tiles than
the GPU has SMs.

There is no reduction kernel: the consumer (``add_rms_norm``, ``rope_and_cache``) reduces the
split-K partials. Bytes moved besides weights and rows: X * T * E * 4 of partials.
"""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels import skinny_gemm
from pallas_kernels.gemv_row import MergedRow, NormedRow, RowSource
from pallas_kernels.mosaic_emit import multiprocessors
from pallas_kernels.partial import Partial
from pallas_kernels.skinny_gemm import Cut, ring_slots, store_rows
from pallas_kernels.unmerged_attention import UnmergedAttention

_MOST_SPLITS = 8
_FEW_ROWS = 16
_LONG_CHUNK_ROWS = 64  # beyond, a run of the whole depth is faster in shorter chunks
_SHARED_BYTES = 220 << 10


def refusal(rows: int, depth: int, columns: int, dtype: DTypeLike) -> str | None:
    """Why `split_k_gemm` cannot multiply [rows, depth] with [depth, columns], or None."""
    why = skinny_gemm.refusal(rows, depth, columns, dtype)
    if why is not None or rows > 1:
        return why
    return skinny_gemm.row_refusal(depth, _run(depth, columns))


def normed_refusal(
    rows: int, depth: int, columns: int, dtype: DTypeLike, pending_bias: bool
) -> str | None:
    """Why `norm_split_k_gemm` cannot, or None."""
    if rows != 1:
        return f"{rows} rows; a norm is part of the product for one row only"
    if pending_bias:
        return "a pending bias; it takes updates without one"
    # Every program computes the norm of the whole row.
    return refusal(rows, depth, columns, dtype) or skinny_gemm.row_refusal(depth, depth)


def merged_refusal(rows: int, depth: int, columns: int, dtype: DTypeLike) -> str | None:
    """Why `merge_split_k_gemm` cannot, or None."""
    if rows != 1:
        return f"{rows} rows; the merge is part of the product for one row only"
    return refusal(rows, depth, columns, dtype)


def split_k_gemm(
    h: Float[Array, "T D"], w: Float[Array, "D E"], *, splits: int | None = None
) -> Partial:
    """h @ w as split-K partials; the same ones at every call.

    Args:
        h, w: bfloat16 or float16, both alike; T is 1, 8, 16, 32, 64 or 128, D and E multiples of
            64, D of 128 where T is 1.
        splits: X; None for as many as fill the multiprocessors, at most 8.

    Raises:
        ValueError: a shape or dtype the kernel does not take.
    """
    return Partial(_split(h, w, splits)[0], dtype=h.dtype)


def merge_split_k_gemm(attention: UnmergedAttention, w: Float[Array, "D E"]) -> Partial:
    """``split_k_gemm`` of one row of attention, which is merged on the way; D is N * H."""
    return Partial(_split(MergedRow(attention), w, None)[0], dtype=attention.out.dtype)


def norm_split_k_gemm(
    x: Float[Array, "1 D"],
    update: Float[Array, "1 D"] | Partial,
    weight: Float[Array, " D"],
    eps: float,
    w: Float[Array, "D E"],
) -> tuple[Float[Array, "1 D"], Partial]:
    """(x + update, ``split_k_gemm`` of its RMSNorm); arguments as in ``add_rms_norm``."""
    parts, total = _split(NormedRow(x, update, weight, eps), w, None)
    return total, Partial(parts, dtype=x.dtype)


def _run(depth: int, columns: int) -> int:
    """Numbers of a row that a program takes, where there is one row."""
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
    return skinny_gemm.skinny_gemm("split_k_gemm", h, w[:, None], cut, shape, finish)


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
