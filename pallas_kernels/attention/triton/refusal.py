"""What the Triton kernels cannot run, and why. They take pages of any size."""

import jax.numpy as jnp

from rjax.pallas_kernels.attention.backend import AttentionShape
from rjax.pallas_kernels.attention.triton.config import BLOCK_M, HEAD_DIMS
from rjax.pallas_kernels.kernel import DeviceInfo, supports

COMPUTE_CAPABILITIES = (8, 9)


def refusal(shape: AttentionShape, device: DeviceInfo) -> str | None:
    """Why the kernels cannot serve this shape on this device, or None if they can."""
    if not supports(device, COMPUTE_CAPABILITIES):
        return "it needs an Ampere, Ada or Hopper GPU (compute capability 8.0 to 9.0)"
    return shape_refusal(shape) or _installation_refusal()


def shape_refusal(shape: AttentionShape) -> str | None:
    """Why the kernels cannot serve this shape on any device, or None if they can."""
    if jnp.dtype(shape.dtype) not in (jnp.bfloat16, jnp.float16):
        return f"it takes dtype bfloat16 and float16, not {jnp.dtype(shape.dtype).name}"
    if shape.head_dim not in HEAD_DIMS:
        return (
            f"it takes head dims from {HEAD_DIMS[0]} to {HEAD_DIMS[-1]} in steps of "
            f"{HEAD_DIMS.step}, not {shape.head_dim}"
        )
    if shape.group_size > BLOCK_M:
        return f"it takes at most {BLOCK_M} query heads a KV head, not {shape.group_size}"
    return None


def _installation_refusal() -> str | None:
    try:
        import jax_triton
    except ImportError as error:
        return f'jax-triton cannot be imported ({error}); run: pip install "jax-triton<0.4"'
    if jax_triton.__version_info__ >= _TOO_NEW:
        found = jax_triton.__version__
        return (
            f'jax-triton is {found}, which is called otherwise; run: pip install "jax-triton<0.4"'
        )
    return None


_TOO_NEW = (0, 4)
