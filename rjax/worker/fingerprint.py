"""The identity of a model, for KV that is kept on disk."""

import hashlib

import jax
import jax.numpy as jnp
import numpy as np

from rjax.models import ModelConfig

_SAMPLES = 64  # values of each weight


def model_fingerprint(config: ModelConfig, leaves: list[jax.Array]) -> str:
    """A SHA-256 hex digest of the configuration and of a sample of every weight."""
    digest = hashlib.sha256(repr(config).encode())
    for leaf in leaves:
        step = max(1, leaf.size // _SAMPLES)
        digest.update(np.asarray(jnp.ravel(leaf)[::step]).tobytes())
    return digest.hexdigest()
