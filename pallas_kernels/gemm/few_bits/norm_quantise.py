"""Residual sum and RMSNorm whose rows are quantised to float8_e4m3fn on Hopper, in one launch.

Bytes moved: those of ``add_rms_norm``, but a byte for a number of the normed row, and its scale.
"""

from typing import Any

import jax
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from rjax.pallas_kernels.gemm.base import LinearProblem, streaming_kernel
from rjax.pallas_kernels.gemm.few_bits import quantised_gemm
from rjax.pallas_kernels.gemm.few_bits.quantised_rows import (
    QuantisedRows,
    channels_refusal,
    launch_rows,
    quantised_shapes,
    refusal,
    store_quantised,
)
from rjax.pallas_kernels.mosaic.emit import begin_kernel, store_strided, widest_vector
from rjax.pallas_kernels.pending import Partial
from rjax.pallas_kernels.residual import add_rms_norm


def add_rms_norm_quantise(
    x: Float[Array, "T D"],
    update: Float[Array, "T D"] | Partial,
    weight: Float[Array, " D"],
    eps: float,
) -> tuple[Float[Array, "T D"], QuantisedRows]:
    """(x + update, its RMSNorm quantised): ``quantise_rows`` after ``add_rms_norm``.

    Raises:
        ValueError: a shape or dtype the kernel does not take.
    """
    T, D = x.shape
    pending_bias = isinstance(update, Partial) and update.bias is not None
    why = refusal(D, x.dtype) or add_rms_norm.refusal(D, x.dtype, pending_bias)
    if why is not None:
        raise ValueError(why)
    addend = update.summands if isinstance(update, Partial) else update
    strided = plgpu.Layout.WG_STRIDED((D,), vec_size=widest_vector(D))

    def add_rms_norm_quantise_kernel(
        x_ref, update_ref, weight_ref, residual_ref, values_ref, scale_ref
    ):
        """GMEM: those of ``normed_row``; residual [T, D], values [T, D], scale [1, R]."""
        begin_kernel()
        row = lax.axis_index("row")
        inputs = (x_ref, update_ref, weight_ref)
        residual, normed = add_rms_norm.normed_row(*inputs, row, eps, x.dtype, strided)
        store_strided(residual_ref.at[row], residual, strided)
        store_quantised(values_ref, scale_ref, row, normed, strided)

    out_type = (jax.ShapeDtypeStruct((T, D), x.dtype), *quantised_shapes(T, D))
    launched = launch_rows(add_rms_norm_quantise_kernel, T, out_type, x, addend, weight)
    residual, values, scale = launched
    return residual, QuantisedRows(values, scale, x.dtype)


def norm_refusal(problem: LinearProblem) -> str | None:
    """Why a kernel of rows with one scale each cannot begin with this norm, or None.

    Rows that are not quantised gain nothing by it.
    """
    why = channels_refusal(problem)
    if why is None and problem.pending_bias:
        return "a pending bias; the kernel takes updates without one"
    return why or refusal(problem.depth, problem.dtype)


def _linear_refusal(problem: LinearProblem) -> str | None:
    return norm_refusal(problem) or quantised_gemm.linear_refusal(problem)


def _activation_refusal(problem: LinearProblem) -> str | None:
    return norm_refusal(problem) or quantised_gemm.activation_refusal(problem)


def _run(
    problem: LinearProblem, x: Array, update: Any, weight: Array, leaves: dict[str, Array]
) -> tuple[Array, Partial]:
    x, rows = add_rms_norm_quantise(x, update, weight, problem.eps)
    return x, quantised_gemm.run_linear(problem, rows, leaves)


def _run_activation(
    problem: LinearProblem, x: Array, update: Any, weight: Array, leaves: dict[str, Array]
) -> tuple[Array, Array]:
    x, rows = add_rms_norm_quantise(x, update, weight, problem.eps)
    return x, quantised_gemm.run_activation(problem, rows, leaves)


KERNELS = (
    streaming_kernel("norm_quantised_gemm", "norm_linear", _linear_refusal, _run),
    streaming_kernel(
        "norm_quantised_gate_up", "norm_linear_activation", _activation_refusal, _run_activation
    ),
)
