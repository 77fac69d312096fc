"""Quantised GEMM on Hopper of one row that the kernel computes itself: a norm, or merged attention.

``gemv_row`` says why one row only. fp8 weights multiply quantised rows, whose scale needs the whole
row: relay fusion merges it in a launch of its own then, since merging all of it in every CTA would
read too much, and the GEMM quantises it.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from rjax.pallas_kernels.attention.relay_fusion.mosaic import merge_rows
from rjax.pallas_kernels.gemm.base import LinearProblem, streaming_kernel
from rjax.pallas_kernels.gemm.few_bits import quantised_gemm
from rjax.pallas_kernels.gemm.few_bits.quantised_row import QuantisedRow
from rjax.pallas_kernels.gemm.few_bits.scaled_weight import ScaledWeight
from rjax.pallas_kernels.gemm.gemv_row import MAX_ROW_COLUMNS, MergedRow, NormedRow, RowSource
from rjax.pallas_kernels.pending import Partial, UnmergedAttention


def norm_quantised_gemm(
    x: Float[Array, "1 D"],
    update: Float[Array, "1 D"] | Partial,
    norm_weight: Float[Array, " D"],
    eps: float,
    weight: ScaledWeight,
) -> tuple[Float[Array, "1 D"], Partial]:
    """(x + update, ``quantised_gemm`` of its RMSNorm); arguments as in ``add_rms_norm``.

    The weight is one that ``quantised_gemm.refusal`` and ``row_refusal`` take.
    """
    row = _normed(x, update, norm_weight, eps, weight)
    summands, residual = quantised_gemm.split_k_products(row, weight)
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
    hidden, residual = quantised_gemm.gated_products(row, weight)
    return residual, hidden


def merge_quantised_gemm(attention: UnmergedAttention, weight: ScaledWeight) -> Partial:
    """``quantised_gemm`` of one row of attention; E is N * H.

    The weight is one that ``quantised_gemm.refusal`` and ``row_refusal`` take.
    """
    if weight.is_fp8:
        return quantised_gemm.quantised_gemm(merge_rows(attention).reshape(1, -1), weight)
    [summands] = quantised_gemm.split_k_products(MergedRow(attention), weight)
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


def row_refusal(problem: LinearProblem) -> str | None:
    """Why a kernel cannot norm or merge the row itself, or None."""
    layout = problem.layout
    if layout is None:
        return "unquantised weights"
    if problem.pending_bias:
        return "a pending bias; the kernel takes updates without one"
    is_integer = jnp.issubdtype(layout.dtype, jnp.integer)
    if not is_integer and layout.block != (1, problem.depth):
        outputs, inputs = layout.block
        return f"fp8 weights with scales of {outputs} x {inputs}; the kernel takes channels"
    if problem.rows != 1:
        return f"{problem.rows} rows; the kernel takes one"
    is_whole = is_integer or problem.operation != "merge_linear"  # else the row is merged before
    if is_whole and problem.depth > MAX_ROW_COLUMNS:
        return f"a row of {problem.depth} columns; a CTA holds at most {MAX_ROW_COLUMNS}"
    return None


def _linear_refusal(problem: LinearProblem) -> str | None:
    return row_refusal(problem) or quantised_gemm.linear_refusal(problem)


def _activation_refusal(problem: LinearProblem) -> str | None:
    return row_refusal(problem) or quantised_gemm.activation_refusal(problem)


def _run_norm(
    problem: LinearProblem, x: Array, update: Any, weight: Array, leaves: dict[str, Array]
) -> tuple[Array, Partial]:
    scaled = quantised_gemm.scaled_weight(problem, leaves, 1)
    x, partial = norm_quantised_gemm(x, update, weight, problem.eps, scaled)
    return x, problem.shaped(partial)


def _run_norm_activation(
    problem: LinearProblem, x: Array, update: Any, weight: Array, leaves: dict[str, Array]
) -> tuple[Array, Array]:
    scaled = quantised_gemm.scaled_weight(problem, leaves, 2)
    return norm_quantised_gate_up_gemm(x, update, weight, problem.eps, scaled)


def _run_merge(problem: LinearProblem, attention: Any, leaves: dict[str, Array]) -> Partial:
    scaled = quantised_gemm.scaled_weight(problem, leaves, 1)
    return problem.shaped(merge_quantised_gemm(attention, scaled))


KERNELS = (
    streaming_kernel("norm_row_quantised_gemm", "norm_linear", _linear_refusal, _run_norm),
    streaming_kernel(
        "norm_row_quantised_gate_up",
        "norm_linear_activation",
        _activation_refusal,
        _run_norm_activation,
    ),
    streaming_kernel("merge_row_quantised_gemm", "merge_linear", _linear_refusal, _run_merge),
)
