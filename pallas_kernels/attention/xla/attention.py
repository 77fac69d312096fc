"""Attention by work list in plain JAX, on any device.

For one block of items at a time, it gathers the queries and the KV pages of the items, computes
attention in float32, and stores partial results; then relay fusion merges the partial results of
each row. Only live items are computed. Memory: the gathered KV of a block is at most
``_BLOCK_BYTES``.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from rjax.pallas_kernels.attention.options import apply_sinks, check_per_head, check_shapes
from rjax.pallas_kernels.attention.plan.work_list import AttentionPlan, WorkList
from rjax.pallas_kernels.attention.relay_fusion.xla import relay_fusion
from rjax.pallas_kernels.attention.spec import AttentionSpec
from rjax.pallas_kernels.fp8 import Scales, check_scales, scales_at

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
    pools = (_Pool(k_pages, k_scales), _Pool(v_pages, v_scales))
    operands = _Operands(q, *pools, page_table, positions, alibi_slopes)
    partials = [_list_attention(operands, items, spec) for items in plan.lists]
    out = jnp.concatenate([o.reshape(-1, N, H) for o, _ in partials])
    lse = jnp.concatenate([s.reshape(-1, N) for _, s in partials])
    indptr, slots = jnp.asarray(plan.merge_indptr), jnp.asarray(plan.merge_slots)
    out, lse = relay_fusion(out, lse, indptr, slots)
    if sinks is not None:
        out, lse = apply_sinks(out, lse, sinks)
    return out.astype(q.dtype), lse


class _Pool(NamedTuple):
    """K or V pages [P, K, S, H] and their scales, [K] or [P, K] or None."""

    pages: Float[Array, "P K S H"]
    scales: Scales | None

    def gather(self, pages: Int[Array, "A J"], used: Bool[Array, "A C"]) -> Float[Array, "A K C H"]:
        """float32 rows of J pages of each item; 0 where a token is not used."""
        run = self.pages[pages].astype(jnp.float32)
        if self.scales is not None:
            run *= scales_at(self.scales, pages)[..., None, None]
        (A, C), (K, H) = used.shape, (run.shape[2], run.shape[4])
        return jnp.where(used[:, None, :, None], run.swapaxes(1, 2).reshape(A, K, C, H), 0)


class _Operands(NamedTuple):
    """Arrays of one attention call besides the plan; shapes as in ``paged_attention``."""

    q: Float[Array, "T N H"]
    keys: _Pool
    values: _Pool
    page_table: Int[Array, "B M"]
    positions: Int[Array, " T"]
    alibi_slopes: Float[Array, " N"] | None


def _list_attention(
    operands: _Operands, items: WorkList, spec: AttentionSpec
) -> tuple[Float[Array, "I R N H"], Float[Array, "I R N"]]:
    """Partial float32 (output, LSE) of every item."""
    N, H = operands.q.shape[1:]
    K = operands.keys.pages.shape[1]
    R, C = items.tile_rows, items.tile_tokens
    item_bytes = 2 * C * K * H * 4
    block = max(1, min(items.capacity, _BLOCK_BYTES // item_bytes))
    padded = math.ceil(items.capacity / block) * block
    columns = (items.row_start, items.row_count, items.table_row, items.kv_start, items.kv_stop)
    table = jnp.pad(
        jnp.stack([jnp.asarray(column) for column in columns]),
        ((0, 0), (0, padded - items.capacity)),
    )

    def body(i, carry):
        out, lse = carry
        start = i * block
        some = jax.lax.dynamic_slice_in_dim(table, start, block, axis=1)
        partial, partial_lse = _block_attention(operands, _Block(*some), spec, (R, C))
        out = jax.lax.dynamic_update_slice(out, partial, (start, 0, 0, 0))
        return out, jax.lax.dynamic_update_slice(lse, partial_lse, (start, 0, 0))

    # Result slots of items that are not computed are never merged and stay unwritten.
    init = (
        jnp.empty((padded, R, N, H), jnp.float32),
        jnp.empty((padded, R, N), jnp.float32),
    )
    live_blocks = (jnp.asarray(items.num_items) + block - 1) // block
    out, lse = jax.lax.fori_loop(0, live_blocks, body, init)
    return out[: items.capacity], lse[: items.capacity]


class _Block(NamedTuple):
    """Fields of A items, as in ``WorkList``."""

    row_start: Int[Array, " A"]
    row_count: Int[Array, " A"]
    table_row: Int[Array, " A"]
    kv_start: Int[Array, " A"]
    kv_stop: Int[Array, " A"]


def _block_attention(
    operands: _Operands, items: _Block, spec: AttentionSpec, size: tuple[int, int]
) -> tuple[Float[Array, "A R N H"], Float[Array, "A R N"]]:
    """Partial float32 (output, LSE) of A items of at most ``size`` (R rows, C tokens)."""
    (_, N, H), (_, K, S, _) = operands.q.shape, operands.keys.pages.shape
    A, (R, C) = items.row_start.shape[0], size
    rows = items.row_start[:, None] + jnp.arange(R)
    live_rows = jnp.arange(R) < items.row_count[:, None]
    rows = jnp.where(live_rows, rows, 0)
    # [A, R] queries against [A, C] keys.
    q_pos = jnp.where(live_rows, operands.positions[rows], -1)
    k_pos = items.kv_start[:, None] + jnp.arange(C)
    used = k_pos < items.kv_stop[:, None]
    visible = (k_pos[:, None] <= q_pos[..., None]) & used[:, None]
    if spec.sliding_window is not None:
        visible &= k_pos[:, None] > q_pos[..., None] - spec.sliding_window
    page_index = items.kv_start[:, None] // S + jnp.arange(C // S)
    page_index = jnp.minimum(page_index, operands.page_table.shape[1] - 1)
    pages = operands.page_table[items.table_row[:, None], page_index]

    q_tile = operands.q[rows].astype(jnp.float32).reshape(A, R, K, N // K, H)
    keys = operands.keys.gather(pages, used)
    scores = jnp.einsum("ARKGH,AKCH->AKRGC", q_tile, keys) * spec.scale
    if spec.soft_cap is not None:
        scores = spec.soft_cap * jnp.tanh(scores / spec.soft_cap)
    if operands.alibi_slopes is not None:
        distance = (k_pos[:, None] - q_pos[..., None]).astype(jnp.float32)
        slopes = operands.alibi_slopes.reshape(K, 1, N // K, 1)
        scores += slopes * distance[:, None, :, None]
    scores = jnp.where(visible[:, None, :, None], scores, -jnp.inf)
    row_max = scores.max(-1, keepdims=True)
    row_max = jnp.where(jnp.isneginf(row_max), 0, row_max)
    p = jnp.exp(scores - row_max)
    row_sum = p.sum(-1)
    partial = jnp.einsum("AKRGC,AKCH->ARKGH", p, operands.values.gather(pages, used))
    safe = jnp.where(row_sum == 0, 1, row_sum)
    partial = partial / safe.transpose(0, 2, 1, 3)[..., None]
    lse = jnp.where(row_sum == 0, -jnp.inf, row_max[..., 0] + jnp.log(safe))
    return partial.reshape(A, R, N, H), lse.transpose(0, 2, 1, 3).reshape(A, R, N)
