"""Quantised GEMM on Hopper of one row that the kernel computes itself: a norm, or merged attention.

``gemv_row`` says why one row only. fp8 weights multiply quantised rows, whose scale needs the whole
row: relay fusion merges it in a launch of its own then, since merging all of it in every CTA would
read too much, and the GEMM quantises it.
"""

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from rjax.pallas_kernels.gemv_row import MAX_ROW_COLUMNS, MergedRow, NormedRow, RowSource
from rjax.pallas_kernels.partial import Partial
from rjax.pallas_kernels.quantised_gemm import mosaic
from rjax.pallas_kernels.quantised_gemm.quantised_row import QuantisedRow
from rjax.pallas_kernels.quantised_gemm.scaled_weight import ScaledWeight
from rjax.pallas_kernels.relay_fusion.mosaic import merge_rows
from rjax.pallas_kernels.unmerged_attention import UnmergedAttention


def normed_refusal(
    rows: int,
    depth: int,
    values: DTypeLike,
    block: tuple[int, int],
    pending_bias: bool = False,
) -> str | None:
    """Why the kernels cannot compute the norm of a row themselves, or None.

    Args:
        rows, depth: T, E.
        values: dtype of the weight's values.
        block: (outputs, inputs) that share a scale.
        pending_bias: whether the update is a Partial with a bias.
    """
    if pending_bias:
        return "a pending bias; the kernel takes updates without one"
    why = _scale_refusal(depth, values, block) or _rows_refusal(rows)
    return why or _width_refusal(depth)


def merged_refusal(rows: int, depth: int, values: DTypeLike, block: tuple[int, int]) -> str | None:
    """Why `merge_quantised_gemm` cannot merge a row, or None; as ``normed_refusal``."""
    why = _scale_refusal(depth, values, block) or _rows_refusal(rows)
    # For fp8 weights the row is merged before.
    return why or (_width_refusal(depth) if _is_integer(values) else None)


def _scale_refusal(depth: int, values: DTypeLike, block: tuple[int, int]) -> str | None:
    if not _is_integer(values) and block != (1, depth):
        return f"fp8 weights with scales of {block[0]} x {block[1]}; the kernel takes channels"
    return None


def _rows_refusal(rows: int) -> str | None:
    return f"{rows} rows; the kernel takes one" if rows != 1 else None


def _width_refusal(depth: int) -> str | None:
    if depth > MAX_ROW_COLUMNS:
        return f"a row of {depth} columns; a CTA holds at most {MAX_ROW_COLUMNS}"
    return None


def _is_integer(values: DTypeLike) -> bool:
    return jnp.issubdtype(jnp.dtype(values), jnp.integer)


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
    row = _normed(x, update, norm_weight, eps, weight)
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
    row = _normed(x, update, norm_weight, eps, weight)
    hidden, residual = mosaic.gated_products(row, weight)
    return residual, hidden


def merge_quantised_gemm(attention: UnmergedAttention, weight: ScaledWeight) -> Partial:
    """``quantised_gemm`` of one row of attention; E is N * H.

    The problem is one that ``mosaic.refusal`` and ``merged_refusal`` take.
    """
    if weight.is_fp8:
        return mosaic.quantised_gemm(merge_rows(attention).reshape(1, -1), weight)
    [summands] = mosaic.split_k_products(MergedRow(attention), weight)
    return Partial(summands, dtype=attention.out.dtype)


def _normed(
    x: Float[Array, "1 D"],
    update: Float[Array, "1 D"] | Partial,
    norm_weight: Float[Array, " D"],
    eps: float,
    weight: ScaledWeight,
) -> RowSource:
    row = NormedRow(x, update, norm_weight, eps)
    return QuantisedRow(row) if weight.is_fp8 else row
