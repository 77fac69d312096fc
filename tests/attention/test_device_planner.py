"""The planner inside jit covers what the host's covers, and shares what the host's shares."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rjax.pallas_kernels.attention.plan.device import plan_on_device
from rjax.pallas_kernels.attention.plan.host import CostModel, PlanShape, plan_attention
from rjax.pallas_kernels.attention.plan.splits import SplitPolicy, prefix_split_size
from tests.properties import num_examples

S, MAX_CONTEXT, SEQS, Q = 8, 128, 8, 6
DECODE = PlanShape(rows=SEQS, seqs=SEQS, max_context=MAX_CONTEXT, tile_rows=3, kv_split_size=16)
PREFIXES = dataclasses.replace(DECODE, prefix_split_size=32)
CHUNKS = PlanShape(rows=SEQS * Q, seqs=SEQS, max_context=MAX_CONTEXT, tile_rows=4, kv_split_size=16)
SHARE_WIDE = CostModel(single_row_item=1, single_row_token=1, multi_row_item=10, multi_row_token=2)


@functools.cache
def compiled(shape, sharing):
    return jax.jit(functools.partial(plan_on_device, page_size=S, shape=shape, sharing=sharing))


def planned(table, queries, lengths, shape, sharing="on", prefixes=None):
    plan = compiled(shape, sharing)(table, queries, lengths, prefix_len=prefixes)
    return jax.tree.map(np.asarray, plan)


def page_tables(seed, lengths, forks):
    """Tables in which sequence b shares forks[b] whole pages with its left neighbour."""
    table = np.random.default_rng(seed).permutation(SEQS * MAX_CONTEXT // S).astype(np.int32)
    table = table.reshape(SEQS, -1)
    for b in range(1, SEQS):
        shared = min(forks[b], lengths[b] // S, lengths[b - 1] // S)
        table[b, :shared] = table[b - 1, :shared]
    return table


def covered(plan, table, rows):
    """How often each (row, token) is read, and the page it is read from."""
    times = np.zeros((rows, MAX_CONTEXT), int)
    pages = np.full((rows, MAX_CONTEXT), -1)
    for items in plan.lists:
        for i in range(int(items.num_items)):
            assert 0 < items.row_count[i] <= items.tile_rows
            assert 0 < items.kv_stop[i] - items.kv_start[i] <= items.tile_tokens
            assert items.kv_start[i] % S == 0
            here = slice(items.row_start[i], items.row_start[i] + items.row_count[i])
            tokens = np.arange(items.kv_start[i], items.kv_stop[i])
            times[here, tokens] += 1
            pages[here, tokens] = table[items.table_row[i], tokens // S]
        dead = slice(int(items.num_items), None)
        assert not items.row_count[dead].any()
        assert not items.kv_stop[dead].any()
    return times, pages


def check_merge(plan):
    """Each row merges exactly its own partial results, in the order of the tokens they read."""
    owners, base = {}, 0
    for items in plan.lists:
        for i in range(int(items.num_items)):
            for r in range(items.row_count[i]):
                owners[base + i * items.tile_rows + r] = (items.row_start[i] + r, items.kv_start[i])
        base += items.capacity * items.tile_rows
    merged = {}
    for row in range(plan.merge_indptr.size - 1):
        slots = plan.merge_slots[plan.merge_indptr[row] : plan.merge_indptr[row + 1]].tolist()
        starts = [owners[slot][1] for slot in slots]
        assert starts == sorted(starts)
        merged |= {slot: row for slot in slots}
    assert merged == {slot: row for slot, (row, _) in owners.items()}


batches = st.lists(
    st.tuples(st.integers(0, MAX_CONTEXT), st.integers(0, Q), st.integers(0, 16)),
    min_size=SEQS,
    max_size=SEQS,
)


@settings(max_examples=num_examples(100))
@given(batch=batches, sharing=st.sampled_from(["on", "off", SHARE_WIDE]), seed=st.integers(0, 9))
def test_decode_reads_each_visible_pair_once_as_the_host_plans(batch, sharing, seed):
    lengths, _, forks = (np.array(x, np.int32) for x in zip(*batch, strict=True))
    table = page_tables(seed, lengths, forks)
    live = (lengths > 0).astype(np.int32)
    plan = planned(table, live, lengths, DECODE, sharing)
    times, pages = covered(plan, table, SEQS)
    for b in range(SEQS):
        assert (times[b, : lengths[b]] == 1).all()
        assert not times[b, lengths[b] :].any()
        assert (pages[b, : lengths[b]] == table[b, np.arange(lengths[b]) // S]).all()
    check_merge(plan)
    if live.all():
        host, _ = plan_attention(
            table, np.arange(SEQS + 1), lengths, page_size=S, shape=DECODE, sharing=sharing
        )
        for own, its in zip(jax.tree.leaves(plan), jax.tree.leaves(host), strict=True):
            np.testing.assert_array_equal(own, its)


def splits_of(prefix, length):
    """Begin and end of each split of a sequence, the last one up to its length."""
    ends = [*range(32, prefix, 32), prefix, *range(prefix + 16, length + 16, 16)]
    begins = [0, *ends[:-1]]
    return [(a, min(b, length)) for a, b in zip(begins, ends, strict=True) if a < min(b, length)]


@settings(max_examples=num_examples(100))
@given(batch=batches, sharing=st.sampled_from(["on", "off", SHARE_WIDE]), seed=st.integers(0, 9))
def test_splits_depend_on_the_own_prefix_and_length_alone(batch, sharing, seed):
    """Prefixes of any whole pages, whether neighbours share them or not."""
    lengths, others, forks = (np.array(x, np.int32) for x in zip(*batch, strict=True))
    prefixes = np.minimum(np.minimum(forks + others, lengths // S) * S, MAX_CONTEXT)
    table = page_tables(seed, lengths, forks)
    live = (lengths > 0).astype(np.int32)
    plan = planned(table, live, lengths, PREFIXES, sharing, prefixes)
    times, pages = covered(plan, table, SEQS)
    read = [[] for _ in range(SEQS)]
    for items in plan.lists:
        for i in range(int(items.num_items)):
            for row in range(items.row_start[i], items.row_start[i] + items.row_count[i]):
                read[row].append((int(items.kv_start[i]), int(items.kv_stop[i])))
    for b in range(SEQS):
        assert (times[b, : lengths[b]] == 1).all()
        assert (pages[b, : lengths[b]] == table[b, np.arange(lengths[b]) // S]).all()
        assert sorted(read[b]) == splits_of(int(prefixes[b]), int(lengths[b]))
    check_merge(plan)


@settings(max_examples=num_examples(100))
@given(batch=batches, seed=st.integers(0, 9))
def test_chunks_read_each_visible_pair_once(batch, seed):
    lengths, queries, forks = (np.array(x, np.int32) for x in zip(*batch, strict=True))
    queries = np.minimum(queries, lengths)
    table = page_tables(seed, lengths, forks)
    plan = planned(table, queries, lengths, CHUNKS)
    times, pages = covered(plan, table, SEQS * Q)
    for row in range(SEQS * Q):
        b, i = divmod(row, Q)
        seen = lengths[b] - queries[b] + i + 1 if i < queries[b] else 0
        assert (times[row, :seen] == 1).all()
        assert (pages[row, :seen] == table[b, np.arange(seen) // S]).all()
        if i >= queries[b]:
            assert not times[row].any()
    check_merge(plan)


def test_a_shared_beginning_is_read_once():
    lengths = np.full(SEQS, 100, np.int32)
    table = page_tables(0, lengths, np.full(SEQS, 8))
    plan = planned(table, np.ones(SEQS, np.int32), lengths, DECODE)
    narrow, wide = plan.lists
    read = sum(int((items.kv_stop - items.kv_start).sum()) for items in plan.lists)
    tiles = -(-SEQS // DECODE.tile_rows)
    assert read == 64 * tiles + SEQS * 36
    assert int(wide.num_items) == 64 // 16 * tiles


def test_all_pages_of_a_shared_prefix_are_read_once():
    lengths = np.full(SEQS, 100, np.int32)
    table = page_tables(0, lengths, np.full(SEQS, 9))
    prefixes = np.full(SEQS, 72, np.int32)
    plan = planned(table, np.ones(SEQS, np.int32), lengths, PREFIXES, prefixes=prefixes)
    read = sum(int((items.kv_stop - items.kv_start).sum()) for items in plan.lists)
    tiles = -(-SEQS // PREFIXES.tile_rows)
    assert read == 72 * tiles + SEQS * 28
    assert int(plan.lists[1].num_items) == 3 * tiles  # up to 32, 64 and 72
    assert (np.diff(plan.merge_indptr) == 5).all()


@pytest.mark.parametrize(
    ("rows", "max_context", "splits"), [(512, 2560, 4), (512, 4096, 4), (64, 2560, 1), (8, 512, 1)]
)
def test_splits_of_prefixes_leave_items_for_a_whole_device(rows, max_context, splits):
    policy = SplitPolicy(min_multi_row_items=16, single_row_lanes=33, item_overhead=64)
    assert prefix_split_size(rows, max_context, 32, 256, policy) == 256 * splits
    assert prefix_split_size(rows, max_context, 32, 256, None) == 256


def test_shapes_that_do_not_fit_are_refused():
    table = jnp.zeros((3, 4), jnp.int32)
    ones = jnp.ones(3, jnp.int32)
    with pytest.raises(ValueError, match="3 sequences in pages of 8"):
        plan_on_device(table, ones, ones, page_size=S, shape=DECODE, sharing="on")
    table, ones = jnp.zeros((SEQS, 4), jnp.int32), jnp.ones(SEQS, jnp.int32)
    with pytest.raises(ValueError, match="prefixes at 32 tokens and prefix_len is missing"):
        plan_on_device(table, ones, ones, page_size=S, shape=PREFIXES, sharing="on")
    with pytest.raises(ValueError, match="prefixes at None tokens and prefix_len is given"):
        plan_on_device(
            table, ones, ones, page_size=S, shape=DECODE, sharing="on", prefix_len=ones * S
        )
    chunks = dataclasses.replace(CHUNKS, prefix_split_size=32)
    with pytest.raises(ValueError, match="prefix_len is given for 48 rows of 8 sequences"):
        plan_on_device(
            table, ones, ones, page_size=S, shape=chunks, sharing="on", prefix_len=ones * S
        )


def test_cuts_that_are_to_be_joined_are_refused():
    table, ones = jnp.zeros((SEQS, MAX_CONTEXT // S), jnp.int32), jnp.ones(SEQS, jnp.int32)
    joined = dataclasses.replace(DECODE, split_policy=SplitPolicy(1, 1, 8))
    with pytest.raises(ValueError, match="give a PlanShape with split_policy=None"):
        plan_on_device(table, ones, ones, page_size=S, shape=joined, sharing="on")
