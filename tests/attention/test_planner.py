"""The planner covers each visible pair once, and the plain backend computes what the plan says."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rjax.pallas_kernels.attention.plan.host import (
    MAX_PARTIAL_RESULTS,
    CostModel,
    PlanShape,
    choose_kv_split_size,
    plan_attention,
)
from rjax.pallas_kernels.attention.plan.splits import MAX_COALESCED_SPLITS, SplitPolicy
from rjax.pallas_kernels.attention.reference import paged_attention_reference
from rjax.pallas_kernels.attention.spec import AttentionSpec
from rjax.pallas_kernels.attention.xla import paged_attention
from tests.properties import num_examples

S, MAX_CONTEXT, ROWS, SEQS = 8, 128, 48, 8
SHAPE = PlanShape(rows=ROWS, seqs=SEQS, max_context=MAX_CONTEXT, tile_rows=4, kv_split_size=16)
# More splits than a row has capacity for results, and only the rows of decode steps.
FINE = PlanShape(rows=SEQS, seqs=SEQS, max_context=MAX_CONTEXT, tile_rows=4, kv_split_size=2)
SHARE_WIDE = CostModel(single_row_item=1, single_row_token=1, multi_row_item=10, multi_row_token=2)


def make_batch(rng, lengths, queries, forks, page_size=S):
    """Page tables of sequences; forks[b] = pages that b shares with its left neighbour."""
    pages = rng.permutation(len(lengths) * MAX_CONTEXT // page_size).astype(np.int32)
    table = pages.reshape(len(lengths), -1).copy()
    for b, fork in enumerate(forks):
        if b:
            shared = min(fork, lengths[b] // page_size, lengths[b - 1] // page_size)
            table[b, :shared] = table[b - 1, :shared]
    queries = np.minimum(queries, lengths)
    start = np.concatenate([[0], np.cumsum(queries)]).astype(np.int32)
    return table, start, np.asarray(lengths, np.int32)


batches = st.lists(
    st.tuples(st.integers(1, MAX_CONTEXT), st.integers(1, 6), st.integers(0, 16)),
    min_size=1,
    max_size=SEQS,
)


def check_coverage(plan, table, start, context, page_size):
    """Each visible pair of row and token once, in pages of the row's own table, and no other."""
    rows_in_all = plan.merge_indptr.size - 1
    covered = np.zeros((rows_in_all, MAX_CONTEXT), int)
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
                    pages_seen[row, token] = table[items.table_row[i], token // page_size]
    for b in range(context.size):
        for row in range(start[b], start[b + 1]):
            position = context[b] - (start[b + 1] - row)
            assert (covered[row, : position + 1] == 1).all()
            assert all(pages_seen[row, t] == table[b, t // page_size] for t in range(position + 1))
    assert (covered[start[-1] :] == 0).all()
    slots = plan.merge_slots[: plan.merge_indptr[-1]]
    assert len(set(slots.tolist())) == slots.size == sum(x.row_count.sum() for x in plan.lists)
    # Of each row in order of the tokens.
    begins = np.concatenate([np.repeat(x.kv_start, x.tile_rows) for x in plan.lists])
    for one, end in zip(plan.merge_indptr, plan.merge_indptr[1:], strict=False):
        assert (np.diff(begins[plan.merge_slots[one:end]]) > 0).all()


@settings(max_examples=num_examples(200))
@given(
    batch=batches,
    sharing=st.sampled_from(["on", "off", SHARE_WIDE]),
    seed=st.integers(0, 9),
    split_policy=st.sampled_from(
        [None, None, *(SplitPolicy(*x) for x in ((1, 3, 0), (2, 1, 9), (5, 2, 64)))]
    ),
)
def test_every_visible_pair_is_covered_once(batch, sharing, seed, split_policy):
    lengths, queries, forks = (np.array(x) for x in zip(*batch, strict=True))
    table, start, context = make_batch(np.random.default_rng(seed), lengths, queries, forks)
    shape = dataclasses.replace(SHAPE, split_policy=split_policy)
    plan, stats = plan_attention(table, start, context, page_size=S, shape=shape, sharing=sharing)
    check_coverage(plan, table, start, context, S)
    assert stats.kv_tokens_unshared >= stats.kv_tokens_read


@settings(max_examples=num_examples(100))
@given(
    batch=st.lists(
        st.tuples(st.integers(1, MAX_CONTEXT), st.integers(0, MAX_CONTEXT // 2)),
        min_size=1,
        max_size=SEQS,
    ),
    sharing=st.sampled_from(["on", "off", SHARE_WIDE]),
    least=st.sampled_from([1, 4, 99]),
    lanes=st.sampled_from([1, 7, 999]),
)
def test_long_sequences_have_room(batch, sharing, least, lanes):
    """With 64 splits and capacity for 32 results a row, whatever the policy leaves."""
    lengths, forks = (np.array(x) for x in zip(*batch, strict=True))
    table, start, context = make_batch(
        np.random.default_rng(0), lengths, np.ones_like(lengths), forks, page_size=2
    )
    shape = dataclasses.replace(FINE, split_policy=SplitPolicy(least, lanes, 8))
    assert shape.num_splits == 2 * MAX_PARTIAL_RESULTS
    plan, _ = plan_attention(table, start, context, page_size=2, shape=shape, sharing=sharing)
    check_coverage(plan, table, start, context, 2)


def full_batch(shared_pages):
    """The maximum number of sequences, at full length, in pages of 2."""
    lengths, one = np.full(SEQS, MAX_CONTEXT), np.ones(SEQS, int)
    forks = np.full(SEQS, shared_pages)
    return make_batch(np.random.default_rng(0), lengths, one, forks, page_size=2)


def test_what_has_no_room_is_cut_more_coarsely():
    table, start, context = full_batch(63)
    never = dataclasses.replace(FINE, split_policy=SplitPolicy(99, 1, 8))
    plan, stats = plan_attention(table, start, context, page_size=2, shape=never, sharing="on")
    # All but the last two tokens are shared; at splits of four, all but the last four.
    assert stats.kv_tokens_read == MAX_CONTEXT - 4 + SEQS * 4
    assert plan.merge_indptr[-1] == SEQS * MAX_PARTIAL_RESULTS == never.merge_capacity
    joined = dataclasses.replace(FINE, split_policy=SplitPolicy(8, 1, 8))
    _, stats = plan_attention(table, start, context, page_size=2, shape=joined, sharing="on")
    assert stats.kv_tokens_read == MAX_CONTEXT - 2 + SEQS * 2


def test_a_step_for_long_sequences_shares_as_much_as_one_for_short():
    """64 rows over 2,048 shared and 256 unique tokens, in pages of 64, as on a GPU."""
    split_policy, B, pages = SplitPolicy(17, 33, 64), 64, 36
    table = np.zeros((B, 2048), np.int32)
    table[:, :32] = np.arange(32)
    table[:, 32:pages] = np.arange(32, 32 + B * 4).reshape(B, 4)
    found = []
    for longest in (2304, 131072):
        cut = choose_kv_split_size(longest, 256, split_policy)
        shape = PlanShape(B, B, longest, tile_rows=32, kv_split_size=cut, split_policy=split_policy)
        plan, stats = plan_attention(
            table,
            np.arange(B + 1, dtype=np.int32),
            np.full(B, 2304, np.int32),
            page_size=64,
            shape=shape,
            sharing="on",
        )
        items = [(int(x.num_items), x.kv_stop[: int(x.num_items)].tolist()) for x in plan.lists]
        found.append((items, stats))
    assert shape.single_row_capacity == B * MAX_PARTIAL_RESULTS
    assert found[0] == found[1]
    assert stats.kv_tokens_read == 2048 + B * 256
    # Without a policy, where sharing changes no bit, longer splits keep a row's results few.
    assert (
        choose_kv_split_size(131072, 256, None) == 4096
        and choose_kv_split_size(8192, 256, None) == 256
    )


@pytest.mark.sample(6)
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
        split_policy = None if least is None else SplitPolicy(least, 99, 0)
        shape = dataclasses.replace(SHAPE, split_policy=split_policy)
        plan, stats = plan_attention(table, start, context, page_size=S, shape=shape, sharing="on")
        wide, count = plan.lists[1], int(plan.lists[1].num_items)
        found = zip(wide.row_start, wide.kv_start, wide.kv_stop, strict=True)
        return sorted((int(r), int(a), int(b)) for r, a, b in list(found)[:count]), stats

    apart, stats = runs(None)
    assert len(apart) == 8 + 2  # eight splits of the first four rows, two of the others
    assert runs(6) == (apart, stats)
    assert runs(5)[0] == [(0, a, a + 32) for a in range(0, 128, 32)] + [(4, 0, 32)]
    assert runs(1)[0] == [(0, 0, 128), (4, 0, 32)]
    assert runs(1)[1] == stats


def test_long_shared_runs_stay_in_some_items():
    """Even if fewer would be enough: other CTAs would wait for those that compute them."""
    table, start, context = full_batch(64)
    shape = dataclasses.replace(FINE, split_policy=SplitPolicy(1, 1, 8))
    plan, _ = plan_attention(table, start, context, page_size=2, shape=shape, sharing="on")
    wide = plan.lists[1]
    tiles = SEQS // FINE.tile_rows
    assert int(wide.num_items) == tiles * MAX_CONTEXT // (MAX_COALESCED_SPLITS * 2)
    assert set((wide.kv_stop - wide.kv_start)[: int(wide.num_items)]) == {MAX_COALESCED_SPLITS * 2}


def test_one_row_runs_are_joined_where_that_spares_the_busiest_lane():
    lengths = np.array([128, 128, 40, 128])
    table, start, context = make_batch(
        np.random.default_rng(0), lengths, np.ones(4, int), np.zeros(4, int)
    )

    def runs(lanes, overhead):
        split_policy = SplitPolicy(
            min_multi_row_items=1, single_row_lanes=lanes, item_overhead=overhead
        )
        shape = dataclasses.replace(SHAPE, split_policy=split_policy)
        plan, _ = plan_attention(table, start, context, page_size=S, shape=shape, sharing="on")
        items, count = plan.lists[0], int(plan.lists[0].num_items)
        found = zip(items.row_start, items.kv_start, items.kv_stop, strict=True)
        return [(int(r), int(a), int(b)) for r, a, b in list(found)[:count]]

    # As many lanes as items: coalescing would only leave some of them idle.
    assert {b - a for _, a, b in runs(27, 64)} == {8, 16}
    # One lane: every item less spares it work.
    assert sorted(runs(1, 64)) == [(0, 0, 128), (1, 0, 128), (2, 0, 40), (3, 0, 128)]
    # Two lanes: rows whole would leave one of them 272, runs of 64 tokens both at most 264.
    taken = runs(2, 8)
    loads = [sum(8 + b - a for _, a, b in taken[lane::2]) for lane in range(2)]
    assert max(loads) == 264 and max(b - a for _, a, b in taken) == 64


def test_one_row_runs_are_joined_wherever_they_begin():
    """Splits 1 and 2 belong to different pairs of splits, but to one group of four."""
    count = 4
    lengths, one = np.full(count, 48), np.ones(count, int)
    table, start, context = make_batch(
        np.random.default_rng(0), lengths, one, np.full(count, 16 // S)
    )
    shape = dataclasses.replace(
        SHAPE, split_policy=SplitPolicy(1, single_row_lanes=2, item_overhead=8)
    )
    plan, _ = plan_attention(table, start, context, page_size=S, shape=shape, sharing="on")
    narrow = plan.lists[0]
    assert int(narrow.num_items) == count
    assert (narrow.kv_start[:count] == 16).all() and (narrow.kv_stop[:count] == 48).all()
