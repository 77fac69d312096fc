"""Activations in float8_e4m3fn with a scale for each token, or for each token and group.

The kernel quantises rows in one launch on Hopper (Mosaic GPU), with a scale for each token. One CTA
handles one row: it reads the row once, keeps it in registers, reduces its largest absolute value
over the threads, and writes values and scale. Bytes moved: 3 * E a row and its scale.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, no_type_check

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from rjax.pallas_kernels.gemm.base import LinearProblem
from rjax.pallas_kernels.mosaic.emit import THREADS, begin_kernel, store_strided, widest_vector

GROUP = 128
"""Inputs that share a scale in grouped activations."""
ROW_MULTIPLE = 8
LARGEST = float(jnp.finfo(jnp.float8_e4m3fn).max)
MIN_ABS_MAX = 2.0**-60
"""Lower bound of a row's largest value, so that rows of zeros do not divide by zero."""
_MAX_COLUMNS = 16384  # 128 elements per thread


@no_type_check  # JAX also builds it with other leaves than arrays
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class QuantisedRows:
    """row = value * scale.

    Attributes:
        values: [T, E], float8_e4m3fn.
        scale: float32 [E / GROUP or 1, R], R is T rounded up to a multiple of 8; entries from T on
            are unspecified.
        dtype: dtype of the rows before quantisation.
    """

    values: Float[Array, "T E"]
    scale: Float[Array, "G R"]
    dtype: DTypeLike = dataclasses.field(default=jnp.bfloat16, metadata={"static": True})

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", jnp.dtype(self.dtype))

    @property
    def shape(self) -> tuple[int, ...]:
        """(T, E)."""
        return self.values.shape

    def dequantise(self) -> Float[Array, "T E"]:
        """The rows in float32."""
        T, E = self.values.shape
        scale = jnp.repeat(self.scale[:, :T].T, E // self.scale.shape[0], axis=1)
        return self.values.astype(jnp.float32) * scale


def padded_rows(rows: int) -> int:
    """``rows`` rounded up to a multiple of 8."""
    return -(-rows // ROW_MULTIPLE) * ROW_MULTIPLE


def quantise_rows_xla(h: Float[Array, "T E"], *, grouped: bool = False) -> QuantisedRows:
    """Quantise rows in plain JAX: the largest value of a row or of a group of it becomes 448.

    ``grouped`` says whether each group of 128 inputs of a row has a scale of its own.
    """
    T, E = h.shape
    groups = E // GROUP if grouped else 1
    blocks = h.astype(jnp.float32).reshape(T, groups, -1)
    largest = jnp.maximum(jnp.abs(blocks).max(axis=2), MIN_ABS_MAX)
    values = jnp.clip(blocks * (LARGEST / largest)[..., None], -LARGEST, LARGEST)
    scale = jnp.pad((largest / LARGEST).T, ((0, 0), (0, padded_rows(T) - T)))
    return QuantisedRows(values.astype(jnp.float8_e4m3fn).reshape(T, E), scale, h.dtype)


def refusal(E: int, dtype: DTypeLike) -> str | None:
    """Why the kernel cannot take rows of E elements of ``dtype``, or None."""
    if jnp.dtype(dtype).itemsize != 2:
        return f"rows of {jnp.dtype(dtype)}; the mosaic backend needs a 16-bit dtype"
    if E % THREADS or E > _MAX_COLUMNS:
        return (
            f"rows of {E} elements; the mosaic backend takes multiples of {THREADS} up to "
            f"{_MAX_COLUMNS}"
        )
    return None


def channels_refusal(problem: LinearProblem) -> str | None:
    """Why rows with one scale each cannot multiply the weight of a problem, or None."""
    if problem.layout is None or problem.layout.values != "fp8":
        return "weights that are not fp8"
    if problem.layout.block != (1, problem.depth):
        return f"scales of blocks {problem.layout.block}; it takes channels"
    return None


def quantise_rows(h: Float[Array, "T E"]) -> QuantisedRows:
    """The rows with a scale for each token; the largest value of a row becomes 448.

    Raises:
        ValueError: a shape or dtype the kernel does not take.
    """
    T, E = h.shape
    why = refusal(E, h.dtype)
    if why is not None:
        raise ValueError(why)
    strided = plgpu.Layout.WG_STRIDED((E,), vec_size=widest_vector(E))

    def quantise_rows_kernel(h_ref, values_ref, scale_ref):
        """GMEM: h [T, E], values [T, E], scale [1, R]."""
        begin_kernel()
        row = lax.axis_index("row")
        value = plgpu.load(h_ref.at[row], layout=strided)
        store_quantised(values_ref, scale_ref, row, value, strided)

    values, scale = launch_rows(quantise_rows_kernel, T, quantised_shapes(T, E), h)
    return QuantisedRows(values, scale, h.dtype)


def store_quantised(values_ref, scale_ref, row, value, layout) -> None:
    """Store one row, 16-bit [E] in ``layout``, to values [T, E] and scale [1, R]."""
    value = value.astype(jnp.float32)
    largest = jnp.maximum(jnp.max(jnp.abs(value)), MIN_ABS_MAX)
    values = (value * (LARGEST / largest)).astype(jnp.float8_e4m3fn)
    store_strided(values_ref.at[row], values, layout)
    scale_ref[0, row] = largest * (1 / LARGEST)


def quantised_shapes(T: int, E: int) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """Shapes of values and scale of T rows."""
    return (
        jax.ShapeDtypeStruct((T, E), jnp.float8_e4m3fn),
        jax.ShapeDtypeStruct((1, padded_rows(T)), jnp.float32),
    )


def launch_rows(kernel: Callable[..., None], T: int, out_type: Any, *operands: Array) -> Any:
    """Run a kernel with a CTA of 128 threads for each of T rows."""
    return plgpu.kernel(
        kernel,
        out_type=out_type,
        grid=(T,),
        grid_names=("row",),
        compiler_params=plgpu.CompilerParams(
            unsafe_no_auto_barriers=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
    )(*operands)
