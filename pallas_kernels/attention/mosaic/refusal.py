"""What the Mosaic GPU kernels cannot run, and why."""

import jax.numpy as jnp

from rjax.pallas_kernels.attention.backend import AttentionShape, DeviceInfo, supports
from rjax.pallas_kernels.attention.mosaic.config import FP8_HEAD_DIMS, HEAD_DIMS, KV_TILE, WGMMA_M

COMPUTE_CAPABILITIES = (9,)  # wgmma exists on Hopper only
_SMALL_PAGES = (16, 32)


def refusal(shape: AttentionShape, device: DeviceInfo) -> str | None:
    """Why the kernels cannot serve this shape on this device, or None if they can."""
    if not supports(device, COMPUTE_CAPABILITIES):
        return "it needs a Hopper GPU (compute capability 9.0)"
    return shape_refusal(shape)


def shape_refusal(shape: AttentionShape) -> str | None:
    """Why the kernels cannot serve this shape on any device, or None if they can."""
    if jnp.dtype(shape.dtype) not in (jnp.bfloat16, jnp.float16):
        return f"it takes dtype bfloat16 and float16, not {jnp.dtype(shape.dtype).name}"
    dims = FP8_HEAD_DIMS if shape.has_fp8_kv else HEAD_DIMS
    if shape.head_dim not in dims:
        allowed, given = ", ".join(map(str, dims)), ", with KV in fp8," if shape.has_fp8_kv else ""
        return f"it takes{given} head dims {allowed}, not {shape.head_dim}"
    if shape.page_size not in _SMALL_PAGES and shape.page_size % KV_TILE:
        return f"it takes pages of 16, 32 and multiples of 64 tokens, not {shape.page_size}"
    if shape.group_size > WGMMA_M:
        return f"it takes at most {WGMMA_M} query heads a KV head, not {shape.group_size}"
    return None
