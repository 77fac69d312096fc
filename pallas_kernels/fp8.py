"""KV pages in float8_e4m3fn: value = stored number * scale.

Scales are float32 and positive: one per KV head for the whole pool ([K]), or one per KV head and
page ([P, K]). Keys and values have separate scales.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

Scales = Float[Array, " K"] | Float[Array, "P K"]
_LARGEST = float(jnp.finfo(jnp.float8_e4m3fn).max)


def check_scales(k_pages: Array, v_pages: Array, k_scales, v_scales) -> None:
    """Raise ValueError unless fp8 pages have scales of a valid shape, and other pages have none."""
    P, K = k_pages.shape[:2]
    both = (("k", k_pages, k_scales), ("v", v_pages, v_scales))
    for name, pages, scales in both:
        if pages.dtype == jnp.float8_e4m3fn and scales is None:
            raise ValueError(
                f"{name}_pages are {pages.dtype}; give {name}_scales, for example ones"
            )
        if scales is None:
            continue
        if pages.dtype != jnp.float8_e4m3fn:
            raise ValueError(
                f"{name}_pages are {pages.dtype}, so {name}_scales must be None; "
                "only float8_e4m3fn pages have scales"
            )
        if scales.dtype != jnp.float32 or scales.shape not in ((K,), (P, K)):
            raise ValueError(
                f"{name}_scales is {scales.dtype}{list(scales.shape)}; it must be float32[{K}], "
                f"one per KV head, or float32[{P}, {K}], one per KV head and page"
            )
    if k_pages.dtype != v_pages.dtype:
        raise ValueError(
            f"k_pages are {k_pages.dtype}, v_pages {v_pages.dtype}; they must be equal"
        )


def scales_at(scales: Scales, pages: Int[Array, "*A"]) -> Float[Array, "*A K"]:
    """The scales of ``pages``."""
    return (
        scales[pages]
        if scales.ndim == 2
        else jnp.broadcast_to(scales, (*pages.shape, *scales.shape))
    )


def quantise(
    x: Float[Array, "T K H"], scales: Scales, pages: Int[Array, " T"]
) -> Float[Array, "T K H"]:
    """x / scale, rounded to the nearest float8_e4m3fn and clipped to +-448."""
    scaled = x.astype(jnp.float32) / scales_at(scales, pages)[..., None]
    return jnp.clip(scaled, -_LARGEST, _LARGEST).astype(jnp.float8_e4m3fn)
