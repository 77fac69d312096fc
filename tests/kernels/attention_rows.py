"""One row of attention that is not merged yet, for the kernels that merge it themselves."""

import jax.numpy as jnp
import numpy as np

from rjax.pallas_kernels.attention.relay_fusion.reference import relay_fusion_reference
from rjax.pallas_kernels.pending import UnmergedAttention


def normal(*shape, dtype=jnp.bfloat16, seed=0, scale=1.0):
    values = np.random.default_rng(seed).standard_normal(shape, np.float32)
    return jnp.asarray(scale * values, dtype)


def unmerged_row(N, H, entries, room=48):
    """Entries of NaN beyond the row's own; the row itself where it has one."""
    part = normal(room, N, H, seed=4).at[entries:].set(jnp.nan)
    lse = normal(room, N, dtype=jnp.float32, seed=5, scale=3.0).at[entries:].set(jnp.nan)
    out = normal(1, N, H, seed=6) if entries == 1 else jnp.full((1, N, H), jnp.nan, jnp.bfloat16)
    indptr = jnp.asarray([0, entries], jnp.int32)
    return UnmergedAttention(out, part, lse, indptr)


def merged_row(given):
    """float32 [N * H], in plain arithmetic."""
    count = int(given.merge_indptr[1])
    if count == 0:
        return np.zeros(given.out.size, np.float32)
    if count == 1:
        return np.asarray(given.out, np.float32).ravel()
    part = given.partial_out[:count, None].astype(jnp.float32)
    return np.asarray(relay_fusion_reference(part, given.partial_lse[:count, None])[0]).ravel()
