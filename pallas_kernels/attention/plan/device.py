"""The device planner: the host planner's work lists, computed inside jit.

It serves decode loops that run without the host. Every sequence has the same number of packed query
rows, of which the first ``query_len`` are live; the host planner takes ragged batches. Splits are
not coalesced.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from rjax.pallas_kernels.attention.plan.host import CostModel, PlanShape, Sharing
from rjax.pallas_kernels.attention.plan.work_list import AttentionPlan, WorkList


def plan_on_device(
    page_table: Int[Array, "B M"],
    query_len: Int[Array, " B"],
    context_len: Int[Array, " B"],
    *,
    page_size: int,
    shape: PlanShape,
    sharing: Sharing,
    prefix_len: Int[Array, " B"] | None = None,
) -> AttentionPlan:
    """Plan the attention of B sequences with Q = shape.rows / B packed query rows each.

    Args:
        page_table: page ids; two neighbours hold the same id at the same place only if all their
            tokens up to the end of that page are equal.
        query_len: live rows of each sequence, 0 to Q: rows b * Q + i for i < query_len[b] are the
            last tokens of its context; no item covers the others, which are padding.
        context_len: tokens of each sequence, this step's included; at most ``shape.max_context``.
        page_size: S.
        shape: ``shape.seqs`` is B and ``shape.rows`` a multiple of it; ``split_policy`` is None.
        sharing: which shared splits are read once, see ``plan_attention``. Only steps of one row a
            sequence share. A prompt chunk reads its own table, its rows in tiles.
        prefix_len: tokens of each sequence's prefix, a multiple of the page size. A sequence is
            split at the end of its prefix, so that all of a shared prefix is read once. A row's
            splits depend on its prefix and its length, not on the other rows. Only for steps of one
            row a sequence, with ``shape.prefix_split_size``.

    Returns:
        A plan that covers each visible (row, token) pair once, like the host planner's.

    Raises:
        ValueError: shapes that do not fit each other, a shape that coalesces splits, or prefixes of
            prompt chunks.
    """
    B = page_table.shape[0]
    if shape.split_policy is not None:
        raise ValueError(
            "the shape coalesces splits, which the device planner does not: "
            "give a PlanShape with split_policy=None"
        )
    if shape.seqs != B or shape.rows % B or shape.kv_split_size % page_size:
        raise ValueError(
            f"a plan for {shape.seqs} sequences, {shape.rows} rows and splits of "
            f"{shape.kv_split_size} tokens does not fit {B} sequences in pages of {page_size}; "
            "rows must be a multiple of the sequences, and a split a multiple of the page"
        )
    if (prefix_len is None) != (shape.prefix_split_size is None):
        raise ValueError(
            f"the shape splits prefixes at {shape.prefix_split_size} tokens and prefix_len is "
            f"{'missing' if prefix_len is None else 'given'}; give both or none"
        )
    if shape.rows == B:
        split = _splits(shape, prefix_len)
        return _plan_decode(page_table, query_len, context_len, page_size, shape, sharing, *split)
    if prefix_len is not None:
        raise ValueError(
            f"prefix_len is given for {shape.rows} rows of {B} sequences; leave it out where a "
            "sequence has more than one row"
        )
    return _plan_chunks(query_len, context_len, shape)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class _Candidates:
    """Every possible item, live or not, in order of the tokens that it reads."""

    live: Bool[Array, " X"]
    row_start: Int[Array, " X"]
    row_count: Int[Array, " X"]
    table_row: Int[Array, " X"]
    kv_start: Int[Array, " X"]
    kv_stop: Int[Array, " X"]


def _splits(shape: PlanShape, prefix_len: Int[Array, " B"] | None) -> tuple[Array, Array]:
    """Begin and end of each split of each sequence, whatever its length: [J, B]."""
    C, number = shape.kv_split_size, jnp.arange(shape.num_splits, dtype=jnp.int32)[:, None]
    if prefix_len is None:
        start = jnp.broadcast_to(number * C, (shape.num_splits, shape.seqs))
        return start, start + C
    assert shape.prefix_split_size is not None
    of_prefix = -(-prefix_len // shape.prefix_split_size)
    in_prefix, own = number < of_prefix, prefix_len + (number - of_prefix) * C
    start = number * shape.prefix_split_size
    end = jnp.minimum(start + shape.prefix_split_size, prefix_len)
    return jnp.where(in_prefix, start, own), jnp.where(in_prefix, end, own + C)


def _plan_decode(
    page_table, query_len, context_len, page_size, shape, sharing, start, end
) -> AttentionPlan:
    """Plan one row a sequence: neighbours with the same pages over a whole split share an item."""
    B, R, J = shape.seqs, shape.tile_rows, shape.num_splits
    row = jnp.broadcast_to(jnp.arange(B, dtype=jnp.int32), (J, B))
    length = jnp.where(query_len > 0, context_len, 0)
    active = length > start
    shared = jnp.zeros((J, B), bool)
    if sharing != "off" and B > 1:
        last = jnp.clip(end // page_size - 1, 0, page_table.shape[1] - 1)
        ids = jnp.take_along_axis(page_table.T, last, axis=0)
        same = (length >= end)[:, 1:] & (length >= end)[:, :-1]
        for each in (ids, start, end):
            same &= each[:, 1:] == each[:, :-1]
        shared = shared.at[:, 1:].set(same)
    first, stop = _groups(shared, row)
    if isinstance(sharing, CostModel):
        rows, tokens = stop - first, end - start
        cost = -(-rows // R) * (sharing.multi_row_item + sharing.multi_row_token * tokens)
        shared &= cost < rows * (sharing.single_row_item + sharing.single_row_token * tokens)
        first, stop = _groups(shared, row)
    multi_row = stop - first > 1
    place = row - first
    head = active & (~multi_row | (place % R == 0))
    found = _Candidates(
        live=head.ravel(),
        row_start=row.ravel(),
        row_count=jnp.where(multi_row, jnp.minimum(R, stop - row), 1).ravel(),
        table_row=first.ravel(),
        kv_start=start.ravel(),
        kv_stop=jnp.minimum(end, length).ravel(),
    )
    chosen, tokens = multi_row.ravel(), shape.max_item_tokens
    single_items, single_at = _compact(found, ~chosen, shape.single_row_capacity, 1, tokens)
    multi_items, multi_at = _compact(found, chosen, shape.multi_row_capacity, R, tokens)
    owner = row - jnp.where(multi_row, place % R, 0) + jnp.arange(J)[:, None] * B
    slot = jnp.where(
        multi_row,
        single_items.capacity + multi_at[owner] * R + row - owner % B,
        single_at[owner],
    )
    return _merged((single_items, multi_items), active, slot)


def _groups(shared: Bool[Array, "J B"], row: Int[Array, "J B"]) -> tuple[Array, Array]:
    """First row of each row's group, and the row after its last."""
    first = jax.lax.cummax(jnp.where(shared, 0, row), axis=1)
    B = row.shape[1]
    after = jnp.where(shared, B, row)  # a group ends where the next one starts
    ends = jax.lax.cummin(after, axis=1, reverse=True)
    stop = jnp.concatenate([ends[:, 1:], jnp.full_like(ends[:, :1], B)], axis=1)
    return first, stop


def _plan_chunks(query_len, context_len, shape: PlanShape) -> AttentionPlan:
    """Plan several rows a sequence: tiles of rows against the causal part of its context."""
    B, C, R, J = shape.seqs, shape.kv_split_size, shape.tile_rows, shape.num_splits
    Q = shape.rows // B
    tiles = -(-Q // R)
    split, b, tile = jnp.meshgrid(jnp.arange(J), jnp.arange(B), jnp.arange(tiles), indexing="ij")
    # Rows of a chunk before the split do not see it.
    skip = jnp.maximum(split * C - (context_len - query_len)[b], 0)
    begin = jnp.maximum(tile * R, skip)
    end = jnp.minimum((tile + 1) * R, query_len[b])
    found = _Candidates(
        live=(begin < end).ravel(),
        row_start=(b * Q + begin).ravel(),
        row_count=(end - begin).ravel(),
        table_row=b.ravel(),
        kv_start=(split * C).ravel(),
        kv_stop=jnp.minimum((split + 1) * C, context_len[b]).ravel(),
    )
    everything = jnp.ones(found.live.shape, bool)
    items, at = _compact(found, everything, J * B * tiles, R, C)
    row = jnp.arange(shape.rows, dtype=jnp.int32)
    owner = jnp.arange(J)[:, None] * B * tiles + (row // Q) * tiles + row % Q // R
    seen = found.live[owner] & (row >= found.row_start[owner])
    seen &= row < (found.row_start + found.row_count)[owner]
    slot = at[owner] * R + row - found.row_start[owner]
    return _merged((items,), seen, slot)


def _compact(
    found: _Candidates, chosen: Bool[Array, " X"], capacity: int, tile_rows: int, tile_tokens: int
) -> tuple[WorkList, Int[Array, " X"]]:
    """(the live and chosen candidates, moved to the front; the index that each one got)."""
    keep = found.live & chosen
    place = jnp.cumsum(keep, dtype=jnp.int32) - 1
    target = jnp.where(keep, place, capacity)

    # All fields in one array take one scatter.
    fields = (found.row_start, found.row_count, found.table_row, found.kv_start, found.kv_stop)
    packed = jnp.zeros((len(fields), capacity), jnp.int32)
    packed = packed.at[:, target].set(jnp.stack(fields).astype(jnp.int32), mode="drop")
    items = WorkList(
        *packed, jnp.sum(keep, dtype=jnp.int32), tile_rows=tile_rows, tile_tokens=tile_tokens
    )
    return items, place


def _merged(
    lists: tuple[WorkList, ...], seen: Bool[Array, "J T"], slot: Int[Array, "J T"]
) -> AttentionPlan:
    """The plan whose result for row t of split j is in slot ``slot[j, t]``, where ``seen``."""
    count = jnp.sum(seen, axis=0, dtype=jnp.int32)
    indptr = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(count, dtype=jnp.int32)])
    place = indptr[:-1] + jnp.cumsum(seen, axis=0, dtype=jnp.int32) - 1
    target = jnp.where(seen, place, seen.size)
    slots = jnp.zeros(seen.size, jnp.int32).at[target].set(slot.astype(jnp.int32), mode="drop")
    return AttentionPlan(lists, indptr, slots)
