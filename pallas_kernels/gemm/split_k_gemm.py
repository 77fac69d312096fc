"""Split-K GEMM of few rows on Hopper (``skinny_gemm``), for matrices with fewer column tiles than
the GPU has SMs.

There is no reduction kernel: the consumer (``add_rms_norm``, ``rope_and_cache``) reduces the
split-K partials. Bytes moved besides weights and rows: X * T * E * 4 of partials.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from rjax.pallas_kernels.gemm import skinny_gemm
from rjax.pallas_kernels.gemm.base import (
    LinearProblem,
    only_norm_of_one_row,
    only_unquantised,
    streaming_kernel,
)
from rjax.pallas_kernels.gemm.gemv_row import MergedRow, NormedRow, RowSource
from rjax.pallas_kernels.gemm.skinny_gemm import GemmConfig, pipeline_stages, store_rows
from rjax.pallas_kernels.mosaic.emit import num_sms
from rjax.pallas_kernels.pending import Partial, UnmergedAttention

_MAX_SPLIT_K = 8
_FEW_ROWS = 16
_LONG_BLOCK_ROWS = 64  # with more rows and no split, short depth blocks are faster
_SMEM_BYTES = 220 << 10


def refusal(rows: int, depth: int, columns: int, dtype: DTypeLike) -> str | None:
    """Why `split_k_gemm` cannot multiply [rows, depth] with [depth, columns], or None."""
    why = skinny_gemm.refusal(rows, depth, columns, dtype)
    if why is not None or rows > 1:
        return why
    return skinny_gemm.row_refusal(depth, _columns_per_cta(depth, columns))


def split_k_gemm(
    h: Float[Array, "T D"],
    w: Float[Array, "D E"],
    *,
    splits: int | None = None,
    early_weights: bool = False,
) -> Partial:
    """h @ w as split-K partials; deterministic.

    Args:
        h, w: bfloat16 or float16, the same for both. T is 1, 8, 16, 32, 64 or 128; D and E are
            multiples of 64, and D is a multiple of 128 if T is 1.
        splits: X; None for as many as fill the SMs, at most 8.
        early_weights: whether no kernel of the program writes w, so that it may be read early.

    Raises:
        ValueError: a shape or dtype the kernel does not take.
    """
    return Partial(_gemm(h, w, splits, early_weights)[0], dtype=h.dtype)


def merge_split_k_gemm(
    attention: UnmergedAttention, w: Float[Array, "D E"], *, early_weights: bool = False
) -> Partial:
    """``split_k_gemm`` of one row of attention, merged in the same kernel; D is N * H."""
    summands, *_ = _gemm(MergedRow(attention), w, None, early_weights)
    return Partial(summands, dtype=attention.out.dtype)


def norm_split_k_gemm(
    x: Float[Array, "1 D"],
    update: Float[Array, "1 D"] | Partial,
    weight: Float[Array, " D"],
    eps: float,
    w: Float[Array, "D E"],
    *,
    early_weights: bool = False,
) -> tuple[Float[Array, "1 D"], Partial]:
    """(x + update, ``split_k_gemm`` of its RMSNorm); arguments as in ``add_rms_norm``."""
    summands, residual = _gemm(NormedRow(x, update, weight, eps), w, None, early_weights)
    return residual, Partial(summands, dtype=x.dtype)


def _columns_per_cta(depth: int, columns: int) -> int:
    """Most columns of a single row that one CTA reads."""
    config = _choose_config(1, depth, columns, None)
    return -(-depth // config.block_k // config.split_k) * config.block_k


def _gemm(
    h: Float[Array, "T D"] | RowSource,
    w: Float[Array, "D E"],
    splits: int | None,
    early_weights: bool,
) -> tuple[Array, ...]:
    (T, D), E = h.shape, w.shape[1]
    config = _choose_config(T, D, E, splits)

    def epilogue(out, accs, split, row, column):
        store_rows(out.at[split], accs[0], row, column)

    shape = jax.ShapeDtypeStruct((config.split_k, T, E), jnp.float32)
    return skinny_gemm.skinny_gemm(
        "split_k_gemm", h, w[:, None], config, shape, epilogue, early_weights=early_weights
    )


def _choose_config(T: int, depth: int, columns: int, splits: int | None) -> GemmConfig:
    """The config with the most CTAs that run at once.

    Between two with equally many: wide tiles for few rows, the fewest partials for many rows.
    """
    configs = []
    for block_n in (128, 64):
        tiles = max(1, columns // block_n)
        # A swizzle atom of a single row has 64 columns.
        block_k = 64 if block_n == 128 or depth % 128 or T == 1 else 128
        most = min(_MAX_SPLIT_K, max(1, depth // block_k))
        split_k = splits or max(1, min(most, num_sms() // tiles))
        if T > _LONG_BLOCK_ROWS and split_k == 1:
            block_k = 64
        stages = pipeline_stages(
            T, depth, block_n=block_n, block_k=block_k, split_k=split_k, smem_bytes=_SMEM_BYTES
        )
        configs.append(GemmConfig(block_n, block_k, split_k, stages))
    fitting = [config for config in configs if columns % config.block_n == 0] or configs
    sign = -1 if T > _FEW_ROWS else 1
    return max(fitting, key=lambda c: (columns // c.block_n * c.split_k, sign * c.split_k))


def _refusal(problem: LinearProblem) -> str | None:
    return only_unquantised(problem) or _size_refusal(problem)


def _size_refusal(problem: LinearProblem) -> str | None:
    return refusal(problem.rows, problem.depth, problem.width, problem.dtype)


def _norm_refusal(problem: LinearProblem) -> str | None:
    why = only_unquantised(problem) or only_norm_of_one_row(problem) or _size_refusal(problem)
    return why or skinny_gemm.row_refusal(problem.depth, problem.depth)


def _merge_refusal(problem: LinearProblem) -> str | None:
    why = only_unquantised(problem)
    if why is None and problem.rows != 1:
        return f"{problem.rows} rows; the merge is fused for one row only"
    return why or _size_refusal(problem)


def _matrix(problem: LinearProblem, leaves: dict[str, Array]) -> Float[Array, "D E"]:
    return leaves["weight"].reshape(problem.depth, -1)


def _run(problem: LinearProblem, h: Array, leaves: dict[str, Array]) -> Partial:
    weight, early = _matrix(problem, leaves), problem.early_weights
    return problem.shaped(split_k_gemm(h, weight, early_weights=early))


def _run_norm(
    problem: LinearProblem, x: Array, update: Any, weight: Array, leaves: dict[str, Array]
) -> tuple[Array, Partial]:
    matrix, early = _matrix(problem, leaves), problem.early_weights
    x, partial = norm_split_k_gemm(x, update, weight, problem.eps, matrix, early_weights=early)
    return x, problem.shaped(partial)


def _run_merge(problem: LinearProblem, attention: Any, leaves: dict[str, Array]) -> Partial:
    weight, early = _matrix(problem, leaves), problem.early_weights
    return merge_split_k_gemm(attention, weight, early_weights=early)


KERNELS = (
    streaming_kernel("split_k", "linear", _refusal, _run),
    streaming_kernel("norm_split_k", "norm_linear", _norm_refusal, _run_norm),
    streaming_kernel("merge_split_k", "merge_linear", _merge_refusal, _run_merge),
)
