"""The kernels of quantised projections on Hopper."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from rjax.pallas_kernels.kernel import HOPPER, Kernel
from rjax.pallas_kernels.partial import Partial, reduced
from rjax.pallas_kernels.quantised_gemm import (
    merge_quantise,
    mosaic,
    one_row,
    quantised_rows,
)
from rjax.pallas_kernels.quantised_gemm.quantised_rows import QuantisedRows
from rjax.pallas_kernels.quantised_gemm.scaled_weight import ScaledWeight
from rjax.pallas_kernels.weight import ScaledLayout
from rjax.worker.kernels.linear_problem import LinearProblem


def max_rows(layout: ScaledLayout) -> int | None:
    """Most rows for which the streaming kernel is the fastest on an H200; None for any number.

    With more rows, cuBLAS is faster, with fp8 operands or with a dequantised copy of the weights.
    """
    if layout.values == "fp8":
        return _MAX_ROWS_OF_CHANNELS if layout.channels else None
    return _MAX_ROWS_OF_INTEGERS[layout.values]


_MAX_ROWS_OF_CHANNELS = 64
_MAX_ROWS_OF_INTEGERS = {"int8": 512, "int4": 1024}


def _gemm_refusal(problem: LinearProblem) -> str | None:
    if problem.layout is None:
        return "unquantised weights"
    most = max_rows(problem.layout)
    if most is not None and problem.rows > most:
        return f"{problem.rows} rows; with more than {most}, cuBLAS is faster"
    activated = problem.activation is not None
    return mosaic.refusal(
        problem.rows,
        problem.depth,
        problem.columns[-1] if activated else problem.width,
        problem.dtype,
        problem.layout.dtype,
        problem.layout.block,
        problem.layout.zero_points,
    )


def _gate_up_refusal(problem: LinearProblem) -> str | None:
    if problem.activation is None or not problem.activation.is_swiglu:
        return "it takes silu with a gate"
    return "a bias before the activation" if problem.bias else _gemm_refusal(problem)


def _norm_refusal(problem: LinearProblem) -> str | None:
    """Reason why the norm with fp8 rows cannot run, or None; other rows gain nothing by it."""
    if problem.layout is None or problem.layout.values != "fp8":
        return "weights that are not fp8"
    if problem.layout.block != (1, problem.depth):
        return f"scales of blocks {problem.layout.block}; it takes channels"
    if problem.pending_bias:
        return "a pending bias; the kernel takes updates without one"
    return quantised_rows.refusal(problem.depth, problem.dtype)


def _norm_gemm_refusal(problem: LinearProblem) -> str | None:
    return _norm_refusal(problem) or _gemm_refusal(problem)


def _norm_gate_up_refusal(problem: LinearProblem) -> str | None:
    return _norm_refusal(problem) or _gate_up_refusal(problem)


def _one_row_refusal(problem: LinearProblem) -> str | None:
    """Reason why the GEMM cannot compute the norm itself, or None."""
    if problem.layout is None:
        return "unquantised weights"
    return one_row.normed_refusal(
        problem.rows,
        problem.depth,
        problem.layout.dtype,
        problem.layout.block,
        problem.pending_bias,
    )


def _norm_row_gemm_refusal(problem: LinearProblem) -> str | None:
    return _one_row_refusal(problem) or _gemm_refusal(problem)


def _norm_row_gate_up_refusal(problem: LinearProblem) -> str | None:
    return _one_row_refusal(problem) or _gate_up_refusal(problem)


def _merge_gemm_refusal(problem: LinearProblem) -> str | None:
    """Reason why relay fusion that quantises rows cannot run, or None; other rows gain nothing."""
    if problem.layout is None or problem.layout.values != "fp8":
        return "weights that are not fp8"
    if problem.layout.block != (1, problem.depth):
        return f"scales of blocks {problem.layout.block}; it takes channels"
    why = merge_quantise.refusal(problem.depth, problem.dtype)
    return why or _gemm_refusal(problem)


def _merge_row_gemm_refusal(problem: LinearProblem) -> str | None:
    if problem.layout is None:
        return "unquantised weights"
    values = problem.layout.dtype
    why = one_row.merged_refusal(problem.rows, problem.depth, values, problem.layout.block)
    return why or _gemm_refusal(problem)


def _fp8_dot_refusal(problem: LinearProblem) -> str | None:
    if problem.layout is None or problem.layout.values != "fp8":
        return "weights that are not fp8"
    if jnp.dtype(problem.dtype).itemsize != 2:
        return f"rows of {problem.dtype}; it takes 16-bit dtypes"
    if problem.layout.block != (1, problem.depth):
        return f"scales of blocks {problem.layout.block}; it takes channels"
    if problem.rows <= _MAX_ROWS_OF_CHANNELS:
        return f"{problem.rows} rows; it takes more than {_MAX_ROWS_OF_CHANNELS}"
    return None


def scaled_weight(
    leaves: Mapping[str, Array], columns: tuple[int, ...], matrices: int, *, interleaved: bool
) -> ScaledWeight:
    """The kernel operand of a projection's leaves; ``columns`` is the result's shape after T."""

    def flat(leaf: Array) -> Array:
        outputs = math.prod(leaf.shape[: len(columns)])
        inputs = (-1,) if leaf.ndim > len(columns) else ()
        return leaf.reshape(matrices, outputs // matrices, *inputs)

    zero_points = leaves.get("weight_zero_point")
    return ScaledWeight(
        flat(leaves["weight"]),
        flat(leaves["weight_scale"]),
        None if zero_points is None else flat(zero_points),
        interleaved=interleaved,
    )


def _scaled_weight(problem: LinearProblem, leaves: dict[str, Array], matrices: int) -> ScaledWeight:
    assert problem.layout is not None
    interleaved = problem.layout.is_interleaved(leaves["weight"].shape[-1])
    weight = scaled_weight(leaves, problem.columns, matrices, interleaved=interleaved)
    return dataclasses.replace(weight, is_early=problem.early_weights)


def _shaped(problem: LinearProblem, partial: Partial) -> Partial:
    summands = partial.summands
    return Partial(summands.reshape(*summands.shape[:2], *problem.columns), dtype=partial.dtype)


def _gemm(problem: LinearProblem, h: Array | QuantisedRows, leaves: dict[str, Array]) -> Partial:
    return _shaped(problem, mosaic.quantised_gemm(h, _scaled_weight(problem, leaves, 1)))


def _gate_up(problem: LinearProblem, h: Array | QuantisedRows, leaves: dict[str, Array]) -> Array:
    return mosaic.quantised_gate_up_gemm(h, _scaled_weight(problem, leaves, 2))


def _norm_gemm(
    problem: LinearProblem, x: Array, update: Any, weight: Array, leaves: dict[str, Array]
) -> tuple[Array, Partial]:
    x, rows = quantised_rows.add_rms_norm_quantise(x, update, weight, problem.eps)
    return x, _gemm(problem, rows, leaves)


def _norm_gate_up(
    problem: LinearProblem, x: Array, update: Any, weight: Array, leaves: dict[str, Array]
) -> tuple[Array, Array]:
    x, rows = quantised_rows.add_rms_norm_quantise(x, update, weight, problem.eps)
    return x, _gate_up(problem, rows, leaves)


def _norm_fp8_dot_refusal(problem: LinearProblem) -> str | None:
    return _norm_refusal(problem) or _fp8_dot_refusal(problem)


def _fp8_dot(
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


def _norm_row_gemm(
    problem: LinearProblem, x: Array, update: Any, weight: Array, leaves: dict[str, Array]
) -> tuple[Array, Partial]:
    scaled = _scaled_weight(problem, leaves, 1)
    x, partial = one_row.norm_quantised_gemm(x, update, weight, problem.eps, scaled)
    return x, _shaped(problem, partial)


def _norm_row_gate_up(
    problem: LinearProblem, x: Array, update: Any, weight: Array, leaves: dict[str, Array]
) -> tuple[Array, Array]:
    scaled = _scaled_weight(problem, leaves, 2)
    return one_row.norm_quantised_gate_up_gemm(x, update, weight, problem.eps, scaled)


def _merge_row_gemm(problem: LinearProblem, attention: Any, leaves: dict[str, Array]) -> Partial:
    scaled = _scaled_weight(problem, leaves, 1)
    return _shaped(problem, one_row.merge_quantised_gemm(attention, scaled))


def _merge_gemm(problem: LinearProblem, attention: Any, leaves: dict[str, Array]) -> Partial:
    return _gemm(problem, merge_quantise.merge_quantise(attention), leaves)


def _norm_fp8_activation_refusal(problem: LinearProblem) -> str | None:
    if problem.bias:
        return "a bias before the activation"
    return _norm_fp8_dot_refusal(problem)


def _norm_fp8_dot(
    problem: LinearProblem, x: Array, update: Any, weight: Array, leaves: dict[str, Array]
) -> tuple[Array, Array | Partial]:
    x, rows = quantised_rows.add_rms_norm_quantise(x, update, weight, problem.eps)
    return x, _fp8_dot(problem, rows, leaves)


def _norm_fp8_activation(
    problem: LinearProblem, x: Array, update: Any, weight: Array, leaves: dict[str, Array]
) -> tuple[Array, Array]:
    assert problem.activation is not None and not problem.needs_partial
    x, product = _norm_fp8_dot(problem, x, update, weight, leaves)
    return x, problem.activation(reduced(product))


def _kernel(name: str, operation: str, refusal: Any, run: Any) -> Kernel:
    return _on_hopper(f"mosaic.{name}", operation, refusal, run, streams=True)


def _on_hopper(name: str, operation: str, refusal: Any, run: Any, streams: bool = False) -> Kernel:
    return Kernel(
        name,
        operation,
        "mosaic",
        refusal,
        run,
        pads_rows=streams,
        gives_partial=streams and not operation.endswith("activation"),
        compute_capabilities=HOPPER,
    )


QUANTISED_KERNELS = (
    _kernel("quantised_gemm", "linear", _gemm_refusal, _gemm),
    _kernel("norm_row_quantised_gemm", "norm_linear", _norm_row_gemm_refusal, _norm_row_gemm),
    _kernel("norm_quantised_gemm", "norm_linear", _norm_gemm_refusal, _norm_gemm),
    _kernel("merge_row_quantised_gemm", "merge_linear", _merge_row_gemm_refusal, _merge_row_gemm),
    _kernel("merge_quantised_gemm", "merge_linear", _merge_gemm_refusal, _merge_gemm),
    _kernel("quantised_gate_up", "linear_activation", _gate_up_refusal, _gate_up),
    _kernel(
        "norm_row_quantised_gate_up",
        "norm_linear_activation",
        _norm_row_gate_up_refusal,
        _norm_row_gate_up,
    ),
    _kernel(
        "norm_quantised_gate_up", "norm_linear_activation", _norm_gate_up_refusal, _norm_gate_up
    ),
    _on_hopper("xla.norm_fp8_dot", "norm_linear", _norm_fp8_dot_refusal, _norm_fp8_dot),
    _on_hopper(
        "xla.norm_fp8_activation",
        "norm_linear_activation",
        _norm_fp8_activation_refusal,
        _norm_fp8_activation,
    ),
    _on_hopper("xla.fp8_dot", "linear", _fp8_dot_refusal, _fp8_dot),
)
