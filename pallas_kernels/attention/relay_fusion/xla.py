"""Relay fusion (merge_states) in plain JAX: merge the partial results of each row by LSE."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def relay_fusion(
    partial_out: Float[Array, "X N H"],
    partial_lse: Float[Array, "X N"],
    merge_indptr: Int[Array, " T1"],
    merge_slots: Int[Array, " Y"],
) -> tuple[Float[Array, "T N H"], Float[Array, "T N"]]:
    """Merge any number of partial results per row, in float32.

    Row t merges ``partial_*[merge_slots[merge_indptr[t] : merge_indptr[t + 1]]]``. A partial result
    with LSE -inf is empty, and its output is ignored, even if it is NaN. A row without a non-empty
    partial result gets output 0 and LSE -inf. Method: RelayAttention (Zhu et al., ACL 2024), with
    the maximum subtracted first, so that nothing overflows.
    """
    T = merge_indptr.shape[0] - 1
    entries = jnp.arange(merge_slots.shape[0])
    # Entry e belongs to the last row whose range starts at or before e; padding goes to row T.
    rows = jnp.searchsorted(merge_indptr, entries, side="right", method="sort") - 1
    lse = jnp.where((rows < T)[:, None], partial_lse[merge_slots], -jnp.inf)
    row_max = jax.ops.segment_max(lse, rows, T, indices_are_sorted=True)
    row_max = jnp.where(jnp.isneginf(row_max), 0, row_max)
    weight = jnp.exp(lse - row_max[jnp.minimum(rows, T - 1)])
    row_sum = jax.ops.segment_sum(weight, rows, T, indices_are_sorted=True)
    terms = jnp.where(weight[..., None] > 0, weight[..., None] * partial_out[merge_slots], 0)
    out = jax.ops.segment_sum(terms.astype(jnp.float32), rows, T, indices_are_sorted=True)
    empty = row_sum == 0
    safe = jnp.where(empty, 1, row_sum)
    return (
        jnp.where(empty[..., None], 0, out / safe[..., None]),
        jnp.where(empty, -jnp.inf, row_max + jnp.log(safe)),
    )
