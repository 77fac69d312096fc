"""Attention options that are numbers a head, the same for every backend: checks, and the sinks."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def check_per_head(heads: int, **options: Float[Array, " N"] | None) -> None:
    """Raise ValueError unless each given option holds one float32 a query head."""
    for name, value in options.items():
        if value is not None and (value.shape != (heads,) or value.dtype != jnp.float32):
            raise ValueError(
                f"{name} is {value.dtype}{list(value.shape)}; "
                f"it must be float32[{heads}], one number a query head"
            )


def apply_sinks(
    out: Float[Array, "T N H"], lse: Float[Array, "T N"], sinks: Float[Array, " N"]
) -> tuple[Float[Array, "T N H"], Float[Array, "T N"]]:
    """Let each head's sink, a logit with no value, join the softmax of each row.

    It adds exp(sinks[n]) to the denominator, once a row: call it on the merged result, never on
    partial ones, and merge its results with no others. A row that sees nothing stays 0 and -inf.
    Source: the learned sinks of gpt-oss (OpenAI, 2025).
    """
    joined = jnp.where(jnp.isneginf(lse), lse, jnp.logaddexp(lse, sinks))
    return (out * jax.nn.sigmoid(lse - sinks)[..., None]).astype(out.dtype), joined
