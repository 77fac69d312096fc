"""Results that their consumer finishes: summands to add, attention to merge."""

import dataclasses
from typing import no_type_check

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int


@no_type_check  # JAX also builds it with other leaves than arrays
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class Partial:
    """A result as float32 summands; the kernel that reads it reduces them.

    The summands are split-K partials, or the partial results of several devices. In that case the
    first axis is sharded over the devices. There is no reduction kernel: the consumer (residual +
    norm, rotary embedding + KV write) reduces.

    Attributes:
        summands: X arrays of the result's shape.
        bias: added to every row of the sum, or None.
        dtype: dtype of the result; the sum is rounded to it before the bias is added.
    """

    summands: Float32[Array, "X T ..."]
    bias: Float[Array, "..."] | None = None
    dtype: DTypeLike = dataclasses.field(default=jnp.bfloat16, metadata={"static": True})

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", jnp.dtype(self.dtype))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the result."""
        return self.summands.shape[1:]

    @property
    def ndim(self) -> int:
        """Axes of the result."""
        return self.summands.ndim - 1

    def __len__(self) -> int:
        """Rows, T."""
        return self.shape[0]

    def reduce(self) -> Float[Array, "T ..."]:
        """The result."""
        total = self.summands.sum(0).astype(self.dtype)
        return total if self.bias is None else total + self.bias


def reduced(value: Float[Array, "T ..."] | Partial) -> Float[Array, "T ..."]:
    """The value as an array; a Partial is reduced."""
    return value.reduce() if isinstance(value, Partial) else value


@no_type_check  # JAX also builds it with other leaves than arrays
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class UnmergedAttention:
    """Partial attention results with their LSE; the kernel that reads them merges them.

    Attributes:
        out: results of the rows with one partial result; the other rows hold stale data.
        partial_out, partial_lse: the X partial results of the other rows.
        merge_indptr: row t merges entries merge_indptr[t] to merge_indptr[t + 1] of
            ``partial_out``; the result of a row with one entry is in ``out``.
    """

    out: Float[Array, "T N H"]
    partial_out: Float[Array, "X N H"]
    partial_lse: Float32[Array, "X N"]
    merge_indptr: Int[Array, " T1"]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the merged result."""
        return self.out.shape

    def __len__(self) -> int:
        """Rows, T."""
        return self.out.shape[0]

    def first_dims(self, dims: int) -> "UnmergedAttention":
        """The results without the dims of H from ``dims`` on."""
        out, partial_out = self.out[:, :, :dims], self.partial_out[:, :, :dims]
        return dataclasses.replace(self, out=out, partial_out=partial_out)
