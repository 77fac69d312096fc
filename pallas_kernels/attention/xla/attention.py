"""Attention by work list in plain JAX: the readable backend, and the one that runs anywhere."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.attention.options import apply_sinks, check_per_head, check_shapes
from pallas_kernels.attention.spec import AttentionSpec
from pallas_kernels.attention.work_list import AttentionPlan, WorkList
from pallas_kernels.fp8 import Scales, check_scales, scales_at
from pallas_kernels.relay_fusion.xla import relay_fusion

_BLOCK_BYTES = 4 << 20  # gathered KV held at once; about the last-level cache of one core


def paged_attention(
    q: Float[Array, "T N H"],
    k_pages: Float[Array, "P K S H"],
    v_pages: Float[Array, "P K S H"],
    page_table: Int[Array, "B M"],
    positions: Int[Array, " T"],
    plan: AttentionPlan,
    spec: AttentionSpec,
    *,
    alibi_slopes: Float[Array, " N"] | None = None,
    sinks: Float[Array, " N"] | None = None,
    k_scales: Scales | None = None,
    v_scales: Scales | None = None,
) -> tuple[Float[Array, "T N H"], Float[Array, "T N"]]:
    """Attention of packed query rows over paged KV, as the plan says.

    Args:
        q: rotated queries, any float dtype.
        k_pages, v_pages: the pool; a page holds S tokens.
        page_table: page ids of each sequence; entries past its length are never used in the result.
        positions: absolute position of each row; negative for padding rows.
        plan: items covering each visible (row, token) pair once, and the merge of their results.
        spec: scale, cap and mask.
        alibi_slopes: float32; head n's scores gain alibi_slopes[n] * (key position - query
            position), after the soft cap (Press et al., 2022).
        sinks: float32 logits, one a head, that join the softmax's denominator once a row (gpt-oss);
            the LSE then counts them.
        k_scales, v_scales: float32 [K] or [P, K]: float8_e4m3fn pages times these are the keys and
            values; given exactly when the pages are float8_e4m3fn.

    Returns:
        Output in q's dtype and natural-log LSE in float32; 0 and -inf for rows that see nothing,
        with sinks too.

    Raises:
        ValueError: an argument of the wrong shape or dtype.
    """
    T, N, H = q.shape
    check_shapes(q, k_pages, v_pages, plan)
    check_per_head(N, alibi_slopes=alibi_slopes, sinks=sinks)
    check_scales(k_pages, v_pages, k_scales, v_scales)
    pools = ((k_pages, k_scales), (v_pages, v_scales))
    partials = [
        _list_attention(q, pools, page_table, positions, items, spec, alibi_slopes)
        for items in plan.lists
    ]
    out = jnp.concatenate([o.reshape(-1, N, H) for o, _ in partials])
    lse = jnp.concatenate([s.reshape(-1, N) for _, s in partials])
    indptr, slots = jnp.asarray(plan.merge_indptr), jnp.asarray(plan.merge_slots)
    out, lse = relay_fusion(out, lse, indptr, slots)
    if sinks is not None:
        out, lse = apply_sinks(out, lse, sinks)
    return out.astype(q.dtype), lse


def _list_attention(
    q: Float[Array, "T N H"],
    pools: tuple[tuple[Float[Array, "P K S H"], Scales | None], ...],
    page_table: Int[Array, "B M"],
    positions: Int[Array, " T"],
    items: WorkList,
    spec: AttentionSpec,
    alibi_slopes: Float[Array, " N"] | None,
) -> tuple[Float[Array, "I R N H"], Float[Array, "I R N"]]:
    """Partial float32 (output, LSE) of every item; walks only the live items, a block at a time."""
    T, N, H = q.shape
    keys, values = pools
    K, S = keys[0].shape[1:3]
    R, C = items.tile_rows, items.tile_tokens
    item_bytes = 2 * C * K * H * 4
    block = max(1, min(items.capacity, _BLOCK_BYTES // item_bytes))
    blocks = math.ceil(items.capacity / block)
    padded = blocks * block

    columns = (items.row_start, items.row_count, items.table_row, items.kv_start, items.kv_stop)
    table = jnp.pad(
        jnp.stack([jnp.asarray(column) for column in columns]),
        ((0, 0), (0, padded - items.capacity)),
    )

    def body(i, carry):
        out, lse = carry
        start = i * block
        row_start, row_count, table_row, kv_start, kv_stop = jax.lax.dynamic_slice_in_dim(
            table, start, block, axis=1
        )
        rows = row_start[:, None] + jnp.arange(R)
        live_rows = jnp.arange(R) < row_count[:, None]
        rows = jnp.where(live_rows, rows, 0)
        # [A, R] queries against [A, C] keys.
        q_pos = jnp.where(live_rows, positions[rows], -1)
        k_pos = kv_start[:, None] + jnp.arange(C)
        visible = (k_pos[:, None] <= q_pos[..., None]) & (k_pos < kv_stop[:, None])[:, None]
        if spec.sliding_window is not None:
            visible &= k_pos[:, None] > q_pos[..., None] - spec.sliding_window
        page_index = kv_start[:, None] // S + jnp.arange(C // S)
        page_index = jnp.minimum(page_index, page_table.shape[1] - 1)
        pages = page_table[table_row[:, None], page_index]
        used = (k_pos < kv_stop[:, None])[:, None, :, None]

        def gather(pool, scales):
            run = pool[pages].astype(jnp.float32)
            if scales is not None:
                run *= scales_at(scales, pages)[..., None, None]
            return jnp.where(used, run.swapaxes(1, 2).reshape(block, K, C, H), 0)

        q_tile = q[rows].astype(jnp.float32).reshape(block, R, K, N // K, H)
        scores = jnp.einsum("ARKGH,AKCH->AKRGC", q_tile, gather(*keys)) * spec.scale
        if spec.soft_cap is not None:
            scores = spec.soft_cap * jnp.tanh(scores / spec.soft_cap)
        if alibi_slopes is not None:
            distance = (k_pos[:, None] - q_pos[..., None]).astype(jnp.float32)
            slopes = alibi_slopes.reshape(K, 1, N // K, 1)
            scores += slopes * distance[:, None, :, None]
        scores = jnp.where(visible[:, None, :, None], scores, -jnp.inf)
        top = scores.max(-1, keepdims=True)
        top = jnp.where(jnp.isneginf(top), 0, top)
        weights = jnp.exp(scores - top)
        total = weights.sum(-1)
        part = jnp.einsum("AKRGC,AKCH->ARKGH", weights, gather(*values))
        safe = jnp.where(total == 0, 1, total)
        part = part / safe.transpose(0, 2, 1, 3)[..., None]
        part_lse = jnp.where(total == 0, -jnp.inf, top[..., 0] + jnp.log(safe))
        out = jax.lax.dynamic_update_slice(out, part.reshape(block, R, N, H), (start, 0, 0, 0))
        lse = jax.lax.dynamic_update_slice(
            lse, part_lse.transpose(0, 2, 1, 3).reshape(block, R, N), (start, 0, 0)
        )
        return out, lse

    # Slots of items never computed are never merged, so nothing needs to be written there.
    init = (
        jnp.empty((padded, R, N, H), jnp.float32),
        jnp.empty((padded, R, N), jnp.float32),
    )
    live_blocks = (jnp.asarray(items.num_items) + block - 1) // block
    out, lse = jax.lax.fori_loop(0, live_blocks, body, init)
    return out[: items.capacity], lse[: items.capacity]
