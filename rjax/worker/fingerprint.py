"""The identity of a model, for KV that is kept on disk."""

import dataclasses
import hashlib
import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, UInt32

from rjax.models import ModelConfig

_SEEDS = (0x9E3779B9, 0x7F4A7C15, 0x85EBCA6B, 0xC2B2AE35)
_UNSIGNED = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


def model_fingerprint(
    config: ModelConfig, leaves: list[jax.Array], *, devices_of_pages: int = 1
) -> str:
    """A SHA-256 hex digest of the configuration and of hashes of all weights.

    The devices hash their own weights, so that none passes through the host. Where the experts are
    and how weights are divided among devices do not change it. Other weights have the same hashes
    by chance alone (once in 2^128), but such weights can be made on purpose.

    Args:
        config: the model's configuration.
        leaves: its weights.
        devices_of_pages: number of devices, where the content of a page depends on it: those of
            layers that share a page have their heads in the order of the devices.
    """
    if config.experts is not None:
        experts = dataclasses.replace(config.experts, parallel=False)
        config = dataclasses.replace(config, experts=experts)
    digest = hashlib.sha256(repr(config).encode())
    if devices_of_pages > 1:
        digest.update(f"{devices_of_pages} devices".encode())
    hashes = [_hashes(leaf) for leaf in leaves]
    for leaf, found in zip(leaves, hashes, strict=True):
        digest.update(f"{leaf.dtype}{leaf.shape}".encode())
        digest.update(np.asarray(found).astype("<u4").tobytes())
    return digest.hexdigest()


@jax.jit
def _hashes(leaf: Array) -> UInt32[Array, "4"]:
    """The sum of a hash of each value's bits and place, for each of the seeds."""
    if leaf.dtype == jnp.int4:
        leaf = leaf.astype(jnp.int8)  # two values a byte have no bits of their own
    bits = jax.lax.bitcast_convert_type(leaf, _UNSIGNED[leaf.dtype.itemsize]).astype(jnp.uint32)
    place = jnp.zeros(leaf.shape, jnp.uint32)
    for axis in range(leaf.ndim):
        stride = jnp.uint32(math.prod(leaf.shape[axis + 1 :]) % 2**32)
        place += stride * jax.lax.broadcasted_iota(jnp.uint32, leaf.shape, axis)
    mixed = [_mixed(bits ^ _mixed(place ^ jnp.uint32(seed))) for seed in _SEEDS]
    return jnp.stack([jnp.sum(each, dtype=jnp.uint32) for each in mixed])


def _mixed(word: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """MurmurHash3's 32-bit finaliser, a bijection whose every output bit depends on all of the
    input's (Appleby, https://github.com/aappleby/smhasher)."""
    word ^= word >> 16
    word *= jnp.uint32(0x85EBCA6B)
    word ^= word >> 13
    word *= jnp.uint32(0xC2B2AE35)
    return word ^ (word >> 16)
