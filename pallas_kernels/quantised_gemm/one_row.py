"""Quantised GEMM of one row that the kernel computes itself: a norm, or merged attention.

For int4 and int8 weights on Hopper. ``gemv_row`` says why one row only. fp8 weights multiply
quantised rows, for which ``quantise_rows`` has the norm.
"""

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from rjax.pallas_kernels.gemv_row import MAX_ROW_COLUMNS, MergedRow, NormedRow
from rjax.pallas_kernels.partial import Partial
from rjax.pallas_kernels.quantised_gemm import mosaic
from rjax.pallas_kernels.quantised_gemm.scaled_weight import ScaledWeight
from rjax.pallas_kernels.unmerged_attention import UnmergedAttention


def normed_refusal(
    rows: int, depth: int, values: DTypeLike, pending_bias: bool = False
) -> str | None:
    """Why the kernels cannot compute the norm of a row themselves, or None.

    Args:
        rows, depth: T, E.
        values: dtype of the weight's values.
        pending_bias: whether the update is a Partial with a bias.
    """
    if pending_bias:
        return "a pending bias; the kernel takes updates without one"
    return merged_refusal(rows, depth, values)


def merged_refusal(rows: int, depth: int, values: DTypeLike) -> str | None:
    """Why `merge_quantised_gemm` cannot merge a row itself, or None; as ``normed_refusal``."""
    if rows != 1:
        return f"{rows} rows; the kernel takes one"
    if not jnp.issubdtype(jnp.dtype(values), jnp.integer):
        return f"weights of {jnp.dtype(values)}; the kernel takes int8 and int4"
    if depth > MAX_ROW_COLUMNS:
        return f"a row of {depth} columns; a CTA holds at most {MAX_ROW_COLUMNS}"
    return None


def norm_quantised_gemm(
    x: Float[Array, "1 D"],
    update: Float[Array, "1 D"] | Partial,
    norm_weight: Float[Array, " D"],
    eps: float,
    weight: ScaledWeight,
) -> tuple[Float[Array, "1 D"], Partial]:
    """(x + update, ``quantised_gemm`` of its RMSNorm); arguments as in ``add_rms_norm``.

    The problem is one that ``mosaic.refusal`` and ``normed_refusal`` take.
    """
    row = NormedRow(x, update, norm_weight, eps)
    summands, residual = mosaic.split_k_products(row, weight)
    return residual, Partial(summands, dtype=x.dtype)


def norm_quantised_gate_up_gemm(
    x: Float[Array, "1 D"],
    update: Float[Array, "1 D"] | Partial,
    norm_weight: Float[Array, " D"],
    eps: float,
    weight: ScaledWeight,
) -> tuple[Float[Array, "1 D"], Float[Array, "1 X"]]:
    """(x + update, ``quantised_gate_up_gemm`` of its RMSNorm), as ``norm_quantised_gemm``."""
    hidden, residual = mosaic.gated_products(NormedRow(x, update, norm_weight, eps), weight)
    return residual, hidden


def merge_quantised_gemm(attention: UnmergedAttention, weight: ScaledWeight) -> Partial:
    """``quantised_gemm`` of one row of attention, merged in the same kernel; E is N * H.

    The problem is one that ``mosaic.refusal`` and ``merged_refusal`` take.
    """
    [summands] = mosaic.split_k_products(MergedRow(attention), weight)
    return Partial(summands, dtype=attention.out.dtype)
