"""Quantised GEMM on Hopper: split-K partials, or SwiGLU of two products.

The weights are the left operand of wgmma (swap-AB) and are streamed once (``stream``). fp8 weights
multiply fp8 rows; int4 and int8 weights become 16-bit in registers. There is no reduction kernel:
the consumer reduces the partials. Bytes moved besides weights and rows: 4 * S * T * X of partials,
or 2 * T * X of results.
"""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from rjax.pallas_kernels.gemm.activation import swiglu
from rjax.pallas_kernels.gemm.base import LinearProblem, only_swiglu, streaming_kernel
from rjax.pallas_kernels.gemm.few_bits import quantised_rows
from rjax.pallas_kernels.gemm.few_bits.config import WGMMA_M, GemmConfig, configs
from rjax.pallas_kernels.gemm.few_bits.quantised_row import QuantisedRow
from rjax.pallas_kernels.gemm.few_bits.quantised_rows import GROUP, QuantisedRows
from rjax.pallas_kernels.gemm.few_bits.scaled_weight import ScaledWeight
from rjax.pallas_kernels.gemm.few_bits.scales import PROMOTION
from rjax.pallas_kernels.gemm.few_bits.stream import gemm_shape, store_transposed, stream_gemm
from rjax.pallas_kernels.gemm.gemv_row import RowSource, StoredRow
from rjax.pallas_kernels.pending import Partial
from rjax.pallas_kernels.weight import ScaledLayout

MAX_ROWS_OF_CHANNELS = 64
"""Most rows of fp8 weights with scales of channels; with more, ``fp8_dot`` is faster."""

_MAX_ROWS_OF_INTEGERS = {"int8": 512, "int4": 1024}
_DEPTH_MULTIPLE = 128
_INTEGERS = ("int8", "int4")


def refusal(
    rows: int,
    depth: int,
    outputs: int,
    dtype: DTypeLike,
    values: DTypeLike,
    block: tuple[int, int],
    zero_points: bool = False,
) -> str | None:
    """Why the kernels cannot multiply [rows, depth] with quantised [outputs, depth], or None.

    Args:
        rows, depth, outputs: T, E, X.
        dtype: dtype of the rows.
        values: dtype of the weight's values.
        block: (outputs, inputs) that share a scale.
        zero_points: whether the weight has any.
    """
    values, dtype = jnp.dtype(values), jnp.dtype(dtype)
    if values.name not in ("float8_e4m3fn", *_INTEGERS):
        return f"weights of {values}; the kernel takes float8_e4m3fn, int8 and int4"
    if dtype.name != "bfloat16" and (values.name in _INTEGERS or dtype.itemsize != 2):
        return f"rows of {dtype} with weights of {values}; the kernel takes bfloat16"
    if rows < 1 or (rows > 8 and rows % 8):
        return f"{rows} rows; the kernel takes multiples of 8 from 8 on"
    if depth % _DEPTH_MULTIPLE or outputs % WGMMA_M:
        return (
            f"weights of {outputs} x {depth}; the kernel takes multiples of {WGMMA_M} x "
            f"{_DEPTH_MULTIPLE}"
        )
    return _block_refusal(depth, values.name, block, zero_points)


def _block_refusal(
    depth: int, values: str, block: tuple[int, int], zero_points: bool
) -> str | None:
    outputs, inputs = block
    if values in _INTEGERS:
        if outputs != 1 or (inputs != 64 and inputs % PROMOTION and inputs != depth):
            return f"scales of {outputs} x {inputs} {values}; the kernel takes 1 x 64 and 1 x 128 n"
        return None
    if zero_points:
        return "fp8 weights with zero points"
    channels = outputs == 1 and inputs == depth
    if not channels and (outputs % WGMMA_M or inputs % PROMOTION):
        return f"scales of {outputs} x {inputs} fp8; the kernel takes channels and 64 m x 128 n"
    return None


def quantised_gemm(
    h: Float[Array, "T E"] | QuantisedRows,
    weight: ScaledWeight,
    *,
    config: GemmConfig | None = None,
) -> Partial:
    """h @ weight[0].T as split-K partials; deterministic.

    Args:
        h: bfloat16; or QuantisedRows, or 16-bit rows that are quantised first, for fp8 weights.
        weight: W = 1; see ``refusal``.
        config: tile sizes; None for the fastest ones by an estimate.

    Raises:
        ValueError: a shape or dtype the kernel does not take.
    """
    return Partial(split_k_products(_prepared(h, weight), weight, config)[0], dtype=h.dtype)


def split_k_products(
    h: Float[Array, "T E"] | QuantisedRows | RowSource,
    weight: ScaledWeight,
    config: GemmConfig | None = None,
) -> tuple[Array, ...]:
    """The partials of ``quantised_gemm``, and the results of a RowSource; without checks."""
    (T, _), (_, X, _) = h.shape, weight.values.shape
    config = config or gemm_configs(h, weight)[0]

    def epilogue(out, sums, split, output, row):
        for which, each in enumerate(sums):
            store_transposed(out.at[split], each, which * (X // len(sums)) + output, row)

    shape = jax.ShapeDtypeStruct((config.split_k, T, X), jnp.float32)
    name = f"quantised_gemm_{weight.values.dtype.name}"
    return stream_gemm(name, h, weight, config, shape, epilogue)


def quantised_gate_up_gemm(
    h: Float[Array, "T E"] | QuantisedRows,
    weight: ScaledWeight,
    *,
    config: GemmConfig | None = None,
) -> Float[Array, "T X"]:
    """silu(h @ weight[0].T) * (h @ weight[1].T) in h's dtype (SwiGLU); only the result is rounded.

    Arguments as in ``quantised_gemm``, with W = 2 and one split.

    Raises:
        ValueError: a shape or dtype the kernel does not take.
    """
    return gated_products(_prepared(h, weight), weight, config)[0]


def gated_products(
    h: Float[Array, "T E"] | QuantisedRows | RowSource,
    weight: ScaledWeight,
    config: GemmConfig | None = None,
) -> tuple[Array, ...]:
    """``quantised_gate_up_gemm``, and the results of a RowSource; without checks."""
    (T, _), (_, X, _) = h.shape, weight.values.shape

    def epilogue(out, sums, split, output, row):
        del split
        store_transposed(out, swiglu(*sums).astype(out.dtype), output, row)

    shape = jax.ShapeDtypeStruct((T, X), h.dtype)
    config = config or gemm_configs(h, weight)[0]
    name = f"quantised_gate_up_gemm_{weight.values.dtype.name}"
    return stream_gemm(name, h, weight, config, shape, epilogue)


def _prepared(
    h: Float[Array, "T E"] | QuantisedRows, weight: ScaledWeight
) -> Float[Array, "T E"] | QuantisedRows | RowSource:
    """The rows that multiply the weight; raise ValueError if they cannot."""
    _, X, E = weight.values.shape
    zero_points = weight.zero_points is not None
    T, depth = h.shape
    assert depth == E
    why = refusal(T, E, X, h.dtype, weight.values.dtype, weight.block, zero_points)
    if why is None and isinstance(h, QuantisedRows) and not weight.is_fp8:
        why = f"quantised rows with weights of {weight.values.dtype}"
    if why is not None:
        raise ValueError(why)
    if isinstance(h, QuantisedRows) or not weight.is_fp8:
        return h
    # Checkpoints with block scales expect a scale for each group of activations.
    grouped = weight.scale.ndim == 3 and weight.block[1] == GROUP
    if grouped or quantised_rows.refusal(E, h.dtype) is not None:
        return quantised_rows.quantise_rows_xla(h, grouped=grouped)
    if T == 1:
        return QuantisedRow(StoredRow(h))
    return quantised_rows.quantise_rows(h)


def gemm_configs(
    h: Float[Array, "T E"] | QuantisedRows | RowSource, weight: ScaledWeight
) -> list[GemmConfig]:
    """The configs that fit, the fastest by an estimate first. Two matrices are not split.

    Args:
        h: bfloat16, or QuantisedRows with fp8 weights. Shapes and dtypes are enough.
        weight: the weight, see ``quantised_gemm``.
    """
    may_split = weight.values.shape[0] == 1
    return configs(gemm_shape(h, weight), may_split=may_split)


def max_rows(layout: ScaledLayout) -> int | None:
    """Most rows for which the streaming kernel is the fastest on an H200; None for any number.

    With more rows, cuBLAS is faster, with fp8 operands or with a dequantised copy of the weights.
    """
    if layout.values == "fp8":
        return MAX_ROWS_OF_CHANNELS if layout.channels else None
    return _MAX_ROWS_OF_INTEGERS[layout.values]


def linear_refusal(problem: LinearProblem) -> str | None:
    """The refusal of ``run_linear``."""
    layout = problem.layout
    if layout is None:
        return "unquantised weights"
    most = max_rows(layout)
    if most is not None and problem.rows > most:
        return f"{problem.rows} rows; with more than {most}, cuBLAS is faster"
    return refusal(
        problem.rows,
        problem.depth,
        problem.width if problem.activation is None else problem.columns[-1],
        problem.dtype,
        layout.dtype,
        layout.block,
        layout.zero_points,
    )


def activation_refusal(problem: LinearProblem) -> str | None:
    """The refusal of ``run_activation``."""
    return only_swiglu(problem) or linear_refusal(problem)


def scaled_weight(problem: LinearProblem, leaves: dict[str, Array], matrices: int) -> ScaledWeight:
    """The weight of a problem that a kernel takes, as ``matrices`` matrices."""
    assert problem.layout is not None
    return ScaledWeight.of_leaves(
        leaves,
        problem.columns,
        matrices,
        interleaved=problem.layout.is_interleaved(leaves["weight"].shape[-1]),
        is_early=problem.early_weights,
    )


def run_linear(
    problem: LinearProblem, h: Array | QuantisedRows, leaves: dict[str, Array]
) -> Partial:
    """The operation "linear", also of rows that are quantised already."""
    return problem.shaped(quantised_gemm(h, scaled_weight(problem, leaves, 1)))


def run_activation(
    problem: LinearProblem, h: Array | QuantisedRows, leaves: dict[str, Array]
) -> Array:
    """The operation "linear_activation", also of rows that are quantised already."""
    return quantised_gate_up_gemm(h, scaled_weight(problem, leaves, 2))


KERNELS = (
    streaming_kernel("quantised_gemm", "linear", linear_refusal, run_linear),
    streaming_kernel("quantised_gate_up", "linear_activation", activation_refusal, run_activation),
)
