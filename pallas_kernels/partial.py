"""Results whose summands are not reduced yet."""

import dataclasses
from typing import no_type_check

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32


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
