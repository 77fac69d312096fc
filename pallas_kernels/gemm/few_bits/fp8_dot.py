"""Products of many rows with fp8 weights, both operands in fp8, by cuBLASLt."""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from rjax.pallas_kernels.gemm.base import LinearProblem
from rjax.pallas_kernels.gemm.few_bits import quantised_rows
from rjax.pallas_kernels.gemm.few_bits.norm_quantise import add_rms_norm_quantise, norm_refusal
from rjax.pallas_kernels.gemm.few_bits.quantised_gemm import MAX_ROWS_OF_CHANNELS
from rjax.pallas_kernels.gemm.few_bits.quantised_rows import QuantisedRows, channels_refusal
from rjax.pallas_kernels.kernel import HOPPER, Kernel
from rjax.pallas_kernels.pending import Partial, reduced


def fp8_dot(
    problem: LinearProblem, h: Float[Array, "T D"] | QuantisedRows, leaves: dict[str, Array]
) -> Float[Array, "T ..."] | Partial:
    """Multiply K-major fp8 operands, which cuBLASLt takes on Hopper, and scale the product.

    The result is rounded to bfloat16 before and after it is scaled: in float32, its bytes cost as
    much as the products. float16 could not hold it.
    """
    if not isinstance(h, QuantisedRows):
        with_kernel = quantised_rows.refusal(problem.depth, h.dtype) is None
        quantise = quantised_rows.quantise_rows if with_kernel else quantised_rows.quantise_rows_xla
        h = quantise(h)
    weight = leaves["weight"].reshape(problem.width, problem.depth)
    rounded = h.dtype == jnp.bfloat16 and not problem.needs_partial
    product = lax.dot_general(
        h.values,
        weight,
        (((1,), (1,)), ((), ())),
        preferred_element_type=jnp.bfloat16 if rounded else jnp.float32,
    )
    scale = leaves["weight_scale"].reshape(-1).astype(jnp.float32)
    product = product.astype(jnp.float32) * h.scale[0, : problem.rows, None] * scale
    product = product.reshape(problem.rows, *problem.columns)
    if problem.needs_partial:
        return Partial(product[None], dtype=h.dtype)
    return product.astype(h.dtype)


def _refusal(problem: LinearProblem) -> str | None:
    why = channels_refusal(problem)
    if why is None and jnp.dtype(problem.dtype).itemsize != 2:
        return f"rows of {problem.dtype}; it takes 16-bit dtypes"
    if why is None and problem.rows <= MAX_ROWS_OF_CHANNELS:
        return f"{problem.rows} rows; it takes more than {MAX_ROWS_OF_CHANNELS}"
    return why


def _norm_refusal(problem: LinearProblem) -> str | None:
    return norm_refusal(problem) or _refusal(problem)


def _activation_refusal(problem: LinearProblem) -> str | None:
    return "a bias before the activation" if problem.bias else _norm_refusal(problem)


def _run_norm(
    problem: LinearProblem, x: Array, update: Any, weight: Array, leaves: dict[str, Array]
) -> tuple[Array, Array | Partial]:
    x, rows = add_rms_norm_quantise(x, update, weight, problem.eps)
    return x, fp8_dot(problem, rows, leaves)


def _run_activation(
    problem: LinearProblem, x: Array, update: Any, weight: Array, leaves: dict[str, Array]
) -> tuple[Array, Array]:
    assert problem.activation is not None and not problem.needs_partial
    x, product = _run_norm(problem, x, update, weight, leaves)
    return x, problem.activation(reduced(product))


def _kernel(name: str, operation: str, refusal: Any, run: Any) -> Kernel:
    return Kernel(name, operation, "mosaic", refusal, run, compute_capabilities=HOPPER)


KERNELS = (
    _kernel("xla.norm_fp8_dot", "norm_linear", _norm_refusal, _run_norm),
    _kernel(
        "xla.norm_fp8_activation", "norm_linear_activation", _activation_refusal, _run_activation
    ),
    _kernel("xla.fp8_dot", "linear", _refusal, fp8_dot),
)
