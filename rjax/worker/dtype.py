"""The dtypes that weights and KV are held in."""

import jax.numpy as jnp

from models import ModelConfig
from rjax.config import DType, KVCacheDType


def choose_dtype(wanted: DType, config: ModelConfig, platform: str) -> jnp.dtype:
    """The dtype asked for; "auto" is the checkpoint's on a GPU and float32 on a CPU.

    CPUs multiply float32 far faster than the 16-bit types.
    """
    if wanted != "auto":
        return jnp.dtype(wanted)
    return jnp.dtype(jnp.float32 if platform == "cpu" else config.dtype)


def choose_kv_dtype(wanted: KVCacheDType, dtype: jnp.dtype) -> jnp.dtype:
    """Of KV pages, where weights are held in ``dtype``: that, or float8_e4m3fn."""
    return dtype if wanted == "auto" else jnp.dtype(jnp.float8_e4m3fn)
