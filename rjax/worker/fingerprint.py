"""The identity of a model, for KV that is kept on disk."""

import dataclasses
import hashlib

import jax
import jax.numpy as jnp
import numpy as np

from rjax.models import ModelConfig

_SAMPLES = 64  # values of each weight


def model_fingerprint(config: ModelConfig, leaves: list[jax.Array]) -> str:
    """A SHA-256 hex digest of the configuration and of a sample of every weight.

    Where the experts are does not change KV.
    """
    if config.experts is not None:
        experts = dataclasses.replace(config.experts, parallel=False)
        config = dataclasses.replace(config, experts=experts)
    digest = hashlib.sha256(repr(config).encode())
    for leaf in leaves:
        step = max(1, leaf.size // _SAMPLES)
        digest.update(np.asarray(jnp.ravel(leaf)[::step]).tobytes())
    return digest.hexdigest()
