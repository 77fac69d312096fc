"""Activations in float8_e4m3fn with a scale for each token, or for each token and group."""

import dataclasses
from typing import no_type_check

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

GROUP = 128
"""Inputs that share a scale in grouped activations."""
ROW_MULTIPLE = 8
LARGEST = float(jnp.finfo(jnp.float8_e4m3fn).max)
MIN_ABS_MAX = 2.0**-60
"""Lower bound of a row's largest value, so that rows of zeros do not divide by zero."""


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


def quantise_rows(h: Float[Array, "T E"], *, grouped: bool = False) -> QuantisedRows:
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
