"""KV in float8_e4m3fn pages: a stored number times its scale is the number meant.

Scales are float32, positive, one a KV head for the whole pool ([K]) or one a KV head of each page
([P, K]); keys and values have their own.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

Scales = Float[Array, " K"] | Float[Array, "P K"]
_LARGEST = float(jnp.finfo(jnp.float8_e4m3fn).max)


def check_scales(k_pages: Array, v_pages: Array, k_scales, v_scales) -> None:
    """Raise ValueError unless fp8 pages come with scales that fit, and other pages with none."""
    P, K = k_pages.shape[:2]
    both = (("k", k_pages, k_scales), ("v", v_pages, v_scales))
    for name, pages, scales in both:
        if pages.dtype == jnp.float8_e4m3fn and scales is None:
            raise ValueError(f"{name}_pages are {pages.dtype}; give {name}_scales, of ones if none")
        if scales is None:
            continue
        if pages.dtype != jnp.float8_e4m3fn:
            raise ValueError(
                f"{name}_pages are {pages.dtype}, which {name}_scales do not go with; "
                "only float8_e4m3fn pages have scales"
            )
        if scales.dtype != jnp.float32 or scales.shape not in ((K,), (P, K)):
            raise ValueError(
                f"{name}_scales is {scales.dtype}{list(scales.shape)}; it must be float32[{K}], "
                f"one a KV head, or float32[{P}, {K}], one a KV head of each page"
            )
    if k_pages.dtype != v_pages.dtype:
        raise ValueError(
            f"k_pages are {k_pages.dtype}, v_pages {v_pages.dtype}; they must be equal"
        )


def scales_at(scales: Scales, pages: Int[Array, "*A"]) -> Float[Array, "*A K"]:
    """The scales of these pages."""
    return (
        scales[pages]
        if scales.ndim == 2
        else jnp.broadcast_to(scales, (*pages.shape, *scales.shape))
    )


def quantise(
    x: Float[Array, "T K H"], scales: Scales, pages: Int[Array, " T"]
) -> Float[Array, "T K H"]:
    """x in units of its page's scale, rounded to the nearest float8_e4m3fn; 448 units at most."""
    units = x.astype(jnp.float32) / scales_at(scales, pages)[..., None]
    return jnp.clip(units, -_LARGEST, _LARGEST).astype(jnp.float8_e4m3fn)
