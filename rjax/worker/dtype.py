"""The dtypes of weights and KV."""

import jax.numpy as jnp

from rjax.config import DType, KVCacheDType
from rjax.models import ModelConfig


def choose_dtype(wanted: DType, config: ModelConfig, platform: str) -> jnp.dtype:
    """The dtype of the weights.

    "auto" is the checkpoint's on a GPU and float32 on a CPU, which multiplies float32 much faster
    than 16-bit types.
    """
    if wanted != "auto":
        return jnp.dtype(wanted)
    return jnp.dtype(jnp.float32 if platform == "cpu" else config.dtype)


def choose_kv_dtype(wanted: KVCacheDType, dtype: jnp.dtype) -> jnp.dtype:
    """The dtype of KV pages: the ``dtype`` of the weights, or float8_e4m3fn."""
    return dtype if wanted == "auto" else jnp.dtype(jnp.float8_e4m3fn)
