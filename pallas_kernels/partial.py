"""Results that are not added up yet."""

import dataclasses
from typing import no_type_check

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32


@no_type_check  # JAX rebuilds it with descriptions of arrays for leaves
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class Partial:
    """A result as float32 summands, which the kernel that reads it adds up.

    Summands are split-K partials, or the shares of several devices: then the first axis is sharded
    over them. There is no reduction kernel: the consumer (residual + norm, rotary embedding + KV
    write) reduces.

    Attributes:
        summands: X arrays of the result's shape.
        bias: one more summand, the same for every row, or None.
        dtype: the sum of the summands is rounded to it once, before the bias is added.
    """

    summands: Float32[Array, "X T ..."]
    bias: Float[Array, "..."] | None = None
    dtype: DTypeLike = dataclasses.field(default=jnp.bfloat16, metadata={"static": True})

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", jnp.dtype(self.dtype))

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the result."""
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
    """The array that a result is, or becomes when its summands are added up."""
    return value.reduce() if isinstance(value, Partial) else value
