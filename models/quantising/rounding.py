"""Rounding a weight to few bits, with the clipping that gives the least error."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from rjax.models.quantising.settings import QuantisingSettings
from rjax.models.quantising.weight import QuantisedWeight
from rjax.models.schemes import Scaled
from rjax.models.schemes.values import ScaleDType, rounded_scale

_RATIOS = np.linspace(1.0, 0.5, 26, dtype=np.float32)
"""Clipping ratios: the largest value that is kept, divided by the largest one of a group."""


def scale_type(dtype: np.dtype) -> ScaleDType:
    """The type of the scales of a weight: its own in the file, as compressed-tensors has it."""
    match dtype.name:
        case "bfloat16":
            return "bfloat16"
        case "float16":
            return "float16"
    return "float32"


def quantise_weight(
    weight: Float[np.ndarray, "X E"],
    settings: QuantisingSettings,
    scale_dtype: ScaleDType,
    products: Float[Array, "E E"] | None = None,
) -> QuantisedWeight:
    """A weight [outputs, inputs] in few bits.

    8 bits are rounded to nearest. For groups, the clipping with the least squared error is chosen:
    of the weight, or of the outputs where ``products`` are given.

    Args:
        weight: any float type.
        settings: the scheme.
        scale_dtype: dtype of the scales.
        products: mean products of two inputs; only the ones within a group are used.
    """
    wide = jnp.asarray(weight.astype(np.float32))
    if settings.group_size is None:
        assert settings.scheme in ("fp8", "int8")
        scheme = Scaled(settings.scheme, scale_dtype=scale_dtype)
        found = scheme.quantise(wide, (1, wide.shape[1]))
        return QuantisedWeight(
            np.asarray(found["weight"]), np.asarray(found["weight_scale"])[:, None]
        )
    blocks = None if products is None else diagonal_blocks(products, settings.group_size)
    values, scale, zero = _clipped(
        wide, blocks, settings.group_size, settings.symmetric, scale_dtype
    )
    return QuantisedWeight(
        values=np.asarray(values.astype(jnp.int8)).reshape(weight.shape),
        scale=np.asarray(scale.astype(scale_dtype)),
        zero_point=None if settings.symmetric else np.asarray(zero.astype(jnp.int8)),
        packed=True,
    )


def diagonal_blocks(products: Float[Array, "E E"], group_size: int) -> Float[Array, "J I I"]:
    """The square blocks of each group along the diagonal."""
    count = products.shape[0] // group_size
    blocks = products.reshape(count, group_size, count, group_size)
    groups = jnp.arange(count)
    return blocks[groups, :, groups]


def round_groups(
    weight: Float[Array, "X E"],
    group_size: int,
    symmetric: bool,
    scale_dtype: ScaleDType,
    ratio: Float[Array, "X J"] | Float[Array, ""] | float = 1.0,
) -> tuple[Float[Array, "X J I"], Float[Array, "X J"], Float[Array, "X J"]]:
    """(values in -8..7, scales, zero points) of groups of inputs, rounded to nearest; float32.

    Args:
        weight: float32.
        group_size: inputs of a group.
        symmetric: zero points are 0.
        scale_dtype: dtype to which scales are rounded before values are.
        ratio: the largest value that is kept, divided by the largest one of the group.
    """
    grouped = weight.reshape(weight.shape[0], -1, group_size)
    if symmetric:
        low, scale = None, jnp.abs(grouped).max(-1) * ratio / 7
    else:
        # The range includes 0, so that a zero point exists.
        low = jnp.minimum(grouped.min(-1), 0) * ratio
        scale = (jnp.maximum(grouped.max(-1), 0) * ratio - low) / 15
    scale = rounded_scale(scale, scale_dtype).astype(jnp.float32)
    scale = jnp.where(scale == 0, 1, scale)  # of zeros, any scale is right
    zero = jnp.zeros_like(scale) if low is None else jnp.clip(jnp.round(-low / scale) - 8, -8, 7)
    values = jnp.round(grouped / scale[..., None]) + zero[..., None]
    return jnp.clip(values, -8, 7), scale, zero


@functools.partial(jax.jit, static_argnames=("group_size", "symmetric", "scale_dtype"))
def _clipped(
    weight: Float[Array, "X E"],
    blocks: Float[Array, "J I I"] | None,
    group_size: int,
    symmetric: bool,
    scale_dtype: ScaleDType,
) -> tuple[Float[Array, "X J I"], Float[Array, "X J"], Float[Array, "X J"]]:
    """`round_groups` at the ratio of the least error, for each group of its own."""
    grouped = weight.reshape(weight.shape[0], -1, group_size)

    def better(best: tuple[Array, Array], ratio: Array) -> tuple[tuple[Array, Array], None]:
        values, scale, zero = round_groups(weight, group_size, symmetric, scale_dtype, ratio)
        error = (values - zero[..., None]) * scale[..., None] - grouped
        weighted = error
        if blocks is not None:
            weighted = jnp.einsum("XJI,JIK->XJK", error, blocks, precision="highest")
        loss = (weighted * error).sum(-1)
        least, chosen = best
        return (jnp.minimum(loss, least), jnp.where(loss < least, ratio, chosen)), None

    groups = grouped.shape[:2]
    start = jnp.full(groups, jnp.inf), jnp.ones(groups)
    (_, ratio), _ = jax.lax.scan(better, start, jnp.asarray(_RATIOS))
    return round_groups(weight, group_size, symmetric, scale_dtype, ratio)
