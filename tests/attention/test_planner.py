"""The planner covers each visible pair once, and the plain backend computes what the plan says."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.attention.planner import CostModel, Joining, PlanShape, plan_attention
from pallas_kernels.attention.reference import paged_attention_reference
from pallas_kernels.attention.spec import AttentionSpec
from pallas_kernels.attention.xla import paged_attention

S, MAX_CONTEXT, ROWS, SEQS = 8, 128, 48, 8
SHAPE = PlanShape(rows=ROWS, seqs=SEQS, max_context=MAX_CONTEXT, tile_rows=4, split_tokens=16)
SHARE_WIDE = CostModel(narrow_item=1, narrow_token=1, wide_item=10, wide_token=2)


def make_batch(rng, lengths, queries, forks):
    """Page tables of sequences; forks[b] = pages that b shares with its left neighbour."""
    pages = rng.permutation(len(lengths) * MAX_CONTEXT // S).astype(np.int32)
    table = pages.reshape(len(lengths), -1).copy()
    for b, fork in enumerate(forks):
        if b:
            shared = min(fork, lengths[b] // S, lengths[b - 1] // S)
            table[b, :shared] = table[b - 1, :shared]
    queries = np.minimum(queries, lengths)
    start = np.concatenate([[0], np.cumsum(queries)]).astype(np.int32)
    return table, start, np.asarray(lengths, np.int32)


batches = st.lists(
    st.tuples(st.integers(1, MAX_CONTEXT), st.integers(1, 6), st.integers(0, 16)),
    min_size=1,
    max_size=SEQS,
)


@settings(max_examples=200, deadline=None)
@given(
    batch=batches,
    sharing=st.sampled_from(["on", "off", SHARE_WIDE]),
    seed=st.integers(0, 9),
    joining=st.sampled_from(
        [None, None, *(Joining(*x) for x in ((1, 3, 0), (2, 1, 9), (5, 2, 64)))]
    ),
)
def test_every_visible_pair_is_covered_once(batch, sharing, seed, joining):
    lengths, queries, forks = (np.array(x) for x in zip(*batch, strict=True))
    table, start, context = make_batch(np.random.default_rng(seed), lengths, queries, forks)
    shape = dataclasses.replace(SHAPE, joining=joining)
    plan, stats = plan_attention(table, start, context, page_size=S, shape=shape, sharing=sharing)
    covered = np.zeros((ROWS, MAX_CONTEXT), int)
    pages_seen = {}
    for items in plan.lists:
        for i in range(int(items.num_items)):
            rows = slice(items.row_start[i], items.row_start[i] + items.row_count[i])
            tokens = slice(items.kv_start[i], items.kv_stop[i])
            assert 0 < items.row_count[i] <= items.tile_rows
            assert 0 < items.kv_stop[i] - items.kv_start[i] <= items.tile_tokens
            covered[rows, tokens] += 1
            for row in range(rows.start, rows.stop):
                for token in range(tokens.start, tokens.stop):
                    pages_seen[row, token] = table[items.table_row[i], token // S]
    for b in range(len(lengths)):
        for row in range(start[b], start[b + 1]):
            position = context[b] - (start[b + 1] - row)
            assert (covered[row, : position + 1] == 1).all()
            assert all(pages_seen[row, t] == table[b, t // S] for t in range(position + 1))
    assert (covered[start[-1] :] == 0).all()
    assert stats.kv_tokens_unshared >= stats.kv_tokens_read
    slots = plan.merge_slots[: plan.merge_indptr[-1]]
    assert len(set(slots.tolist())) == slots.size == sum(x.row_count.sum() for x in plan.lists)


@pytest.mark.parametrize("sharing", ["on", "off", SHARE_WIDE])
@pytest.mark.parametrize("window", [None, 1, 13, 40])
def test_plain_backend_equals_reference(sharing, window):
    rng = np.random.default_rng(3)
    lengths = np.array([100, 70, 66, 128, 5, 64, 33])
    queries = np.array([1, 1, 1, 9, 5, 1, 3])
    table, start, context = make_batch(rng, lengths, queries, np.array([0, 8, 7, 6, 0, 0, 4]))
    N, K, H = 6, 2, 16
    P = table.size + 1
    q = rng.standard_normal((ROWS, N, H)).astype(np.float32)
    k, v = rng.standard_normal((2, P, K, S, H)).astype(np.float32)
    unused = np.setdiff1d(np.arange(P), table)
    k[unused] = v[unused] = np.nan
    positions = np.full(ROWS, -1, np.int32)
    row_table = np.full((ROWS, table.shape[1]), P - 1, np.int32)
    for b in range(len(lengths)):
        positions[start[b] : start[b + 1]] = np.arange(
            context[b] - start[b + 1] + start[b], context[b]
        )
        row_table[start[b] : start[b + 1]] = table[b]
        last = table[b, (context[b] - 1) // S]
        if context[b] % S and (table == last).sum() == 1:
            k[last, :, context[b] % S :] = v[last, :, context[b] % S :] = np.nan
    spec = AttentionSpec(scale=0.25, sliding_window=window)
    plan, _ = plan_attention(table, start, context, page_size=S, shape=SHAPE, sharing=sharing)
    args = [jnp.asarray(x) for x in (q, k, v)]
    attend = jax.jit(paged_attention, static_argnames="spec")
    out, lse = attend(*args, table, positions, plan, spec=spec)
    want, want_lse = paged_attention_reference(
        *args, jnp.asarray(row_table), jnp.asarray(positions), spec
    )
    np.testing.assert_allclose(out, want, atol=2e-6)
    np.testing.assert_allclose(lse, want_lse, atol=2e-6)


def test_sharing_reads_a_prefix_once():
    table, start, context = make_batch(
        np.random.default_rng(0), np.full(8, 100), np.ones(8, int), np.full(8, 8)
    )
    _, on = plan_attention(table, start, context, page_size=S, shape=SHAPE, sharing="on")
    _, off = plan_attention(table, start, context, page_size=S, shape=SHAPE, sharing="off")
    assert on.kv_tokens_read == 64 + 8 * 36
    assert off.kv_tokens_read == off.kv_tokens_unshared == on.kv_tokens_unshared == 800


def test_long_shared_runs_are_joined_while_enough_items_are_left():
    lengths, one = np.full(4, 128), np.ones(4, int)
    long, _, _ = make_batch(np.random.default_rng(0), lengths, one, np.full(4, 16))
    short, _, _ = make_batch(np.random.default_rng(1), lengths, one, np.full(4, 5))
    table = np.concatenate([long, short + long.max() + 1])
    start, context = np.arange(9, dtype=np.int32), np.full(8, 128, np.int32)

    def runs(least):
        joining = None if least is None else Joining(least, 99, 0)
        shape = dataclasses.replace(SHAPE, joining=joining)
        plan, stats = plan_attention(table, start, context, page_size=S, shape=shape, sharing="on")
        wide, count = plan.lists[1], int(plan.lists[1].num_items)
        found = zip(wide.row_start, wide.kv_start, wide.kv_stop, strict=True)
        return sorted((int(r), int(a), int(b)) for r, a, b in list(found)[:count]), stats

    apart, stats = runs(None)
    assert len(apart) == 8 + 2  # eight cuts of the first four rows, two of the others
    assert runs(6) == (apart, stats)
    assert runs(5)[0] == [(0, a, a + 32) for a in range(0, 128, 32)] + [(4, 0, 32)]
    assert runs(1)[0] == [(0, 0, 128), (4, 0, 32)]
    assert runs(1)[1] == stats


def test_one_row_runs_are_joined_where_that_spares_the_busiest_lane():
    lengths = np.array([128, 128, 40, 128])
    table, start, context = make_batch(
        np.random.default_rng(0), lengths, np.ones(4, int), np.zeros(4, int)
    )

    def runs(lanes, overhead):
        joining = Joining(least_wide_items=1, narrow_lanes=lanes, narrow_item_tokens=overhead)
        shape = dataclasses.replace(SHAPE, joining=joining)
        plan, _ = plan_attention(table, start, context, page_size=S, shape=shape, sharing="on")
        items, count = plan.lists[0], int(plan.lists[0].num_items)
        found = zip(items.row_start, items.kv_start, items.kv_stop, strict=True)
        return [(int(r), int(a), int(b)) for r, a, b in list(found)[:count]]

    # As many lanes as items: joining would only leave some of them idle.
    assert {b - a for _, a, b in runs(27, 64)} == {8, 16}
    # One lane: every item less spares it work.
    assert sorted(runs(1, 64)) == [(0, 0, 128), (1, 0, 128), (2, 0, 40), (3, 0, 128)]
    # Two lanes: rows whole would leave one of them 272, runs of 64 tokens both at most 264.
    taken = runs(2, 8)
    loads = [sum(8 + b - a for _, a, b in taken[lane::2]) for lane in range(2)]
    assert max(loads) == 264 and max(b - a for _, a, b in taken) == 64


def test_one_row_runs_are_joined_wherever_they_begin():
    """Cuts 1 and 2 are of two pairs of cuts, and of one run of four."""
    count = 4
    lengths, one = np.full(count, 48), np.ones(count, int)
    table, start, context = make_batch(
        np.random.default_rng(0), lengths, one, np.full(count, 16 // S)
    )
    shape = dataclasses.replace(SHAPE, joining=Joining(1, narrow_lanes=2, narrow_item_tokens=8))
    plan, _ = plan_attention(table, start, context, page_size=S, shape=shape, sharing="on")
    narrow = plan.lists[0]
    assert int(narrow.num_items) == count
    assert (narrow.kv_start[:count] == 16).all() and (narrow.kv_stop[:count] == 48).all()
