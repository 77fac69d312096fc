"""The check mode takes every plan that a planner makes and names what is wrong with any other."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rjax.pallas_kernels.attention.options import check_shapes
from rjax.pallas_kernels.attention.plan.check import check_values, check_writes
from rjax.pallas_kernels.attention.plan.device import plan_on_device
from rjax.pallas_kernels.attention.plan.host import PlanShape, plan_attention
from tests.properties import num_examples

S, SPLIT, TILE = 4, 8, 3


def batch(shared, own, queries, sharing="on", window=None):
    """Sequences with one shared prefix: everything ``check_values`` takes, in one dict. With a
    window they hold no page behind it: entries before their first page repeat it."""
    lengths = shared + np.asarray(own)
    starts = np.concatenate([[0], np.cumsum(queries)]).astype(np.int32)
    B, M, T = len(own), -(-int(lengths.max()) // S) + 1, int(starts[-1]) + 2
    table = np.full((B, M), 10**6, np.int32)  # what lies beyond a sequence may be anything
    cursor = shared // S
    for b in range(B):
        count = -(-int(lengths[b]) // S)
        table[b, :cursor] = np.arange(cursor)
        table[b, shared // S : count] = np.arange(count - shared // S) + cursor + 100 * b
    table[:, : shared // S] = np.arange(shared // S)
    if window is not None:
        for b in range(B):
            first = max(0, int(lengths[b]) - queries[b] - window + 1) // S
            table[b, :first] = table[b, first]
    positions = np.full(T, -1, np.int32)
    owner = np.zeros(T, np.int32)
    for b in range(B):
        rows = slice(starts[b], starts[b + 1])
        positions[rows] = lengths[b] - queries[b] + np.arange(queries[b])
        owner[rows] = b
    shape = PlanShape(
        rows=T,
        seqs=B,
        max_context=int(lengths.max()),
        tile_rows=TILE,
        kv_split_size=SPLIT,
        window=window,
    )
    plan, _ = plan_attention(table, starts, lengths, page_size=S, shape=shape, sharing=sharing)
    return {
        "page_table": table,
        "positions": positions,
        "plan": plan,
        "num_pages": 1000,
        "page_size": S,
        "sequence_of_row": owner,
    }


@settings(max_examples=num_examples(60))
@given(
    shared=st.integers(0, 6).map(lambda x: x * S),
    members=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20)), min_size=1, max_size=7),
    sharing=st.sampled_from(["on", "off"]),
    window=st.none() | st.integers(1, 30),
)
def test_plans_of_the_host_planner_pass(shared, members, sharing, window):
    own, queries = [max(o, q) for o, q in members], [q for _, q in members]
    check_values(**batch(shared, own, queries, sharing), sliding_window=window)
    found = batch(shared, own, queries, sharing, window)
    check_values(**found, sliding_window=window)
    if window is not None:
        plan, at = found["plan"], found["positions"]
        for work in plan.lists:
            for i in range(int(work.num_items)):
                rows = at[work.row_start[i] : work.row_start[i] + work.row_count[i]]
                assert (rows - window + 1 < work.kv_stop[i]).all(), "an item outside a window"


def test_plans_of_the_device_planner_pass():
    given_ = batch(16, [3, 9, 1], [1, 1, 1])
    shape = PlanShape(rows=3, seqs=3, max_context=40, tile_rows=TILE, kv_split_size=SPLIT)
    table = jnp.asarray(np.minimum(given_["page_table"], 999))
    lengths = jnp.asarray([19, 25, 17], jnp.int32)
    plan = plan_on_device(
        table, jnp.ones(3, jnp.int32), lengths, page_size=S, shape=shape, sharing="on"
    )
    check_values(table, lengths - 1, plan, num_pages=1000, page_size=S)


def changed(field, index, value, which=0):
    """The batch with one number of one list changed; ``value`` may be a function of the old one."""
    found = batch(16, [3, 9, 1, 6], [1, 1, 1, 1])
    plan = found["plan"]
    work = plan.lists[which]
    column = np.array(getattr(work, field))
    column[index] = value(column[index]) if callable(value) else value
    lists = list(plan.lists)
    lists[which] = dataclasses.replace(work, **{field: column})
    found["plan"] = dataclasses.replace(plan, lists=tuple(lists))
    return found


@pytest.mark.parametrize(
    ("field", "index", "value", "which", "message"),
    [
        ("num_items", (), 99, 0, "list 0 says it has 99 items"),
        ("row_count", 1, 0, 1, "item 1 of list 1 .*; it must have 1 to 3 rows"),
        ("row_count", 0, 2, 0, "item 0 of list 0 .*; it must have 1 to 1 rows"),
        ("row_start", 0, -1, 0, "rows are 0 to 5"),
        ("row_start", 0, 6, 0, "rows are 0 to 5"),
        ("table_row", 0, 4, 0, "table rows are 0 to 3"),
        ("kv_start", 0, 17, 0, "it must begin with a page of 4"),
        ("kv_stop", 0, 16, 0, "it must have 1 to 8 tokens"),
        ("kv_stop", 0, 40, 0, "it must have 1 to 8 tokens"),
        ("kv_stop", 1, lambda x: x - 1, 0, "no item covers tokens 23 to 23 for row 1"),
        ("kv_start", 1, 20, 0, "no item covers tokens 16 to 19 for row 1 at position 24"),
        ("row_start", 0, 1, 0, "row 1 of sequence 1 reads tokens 16 to 18 by the table of seq"),
        ("table_row", 0, 1, 0, "row 0 of sequence 0 reads .* their pages 4 are 4 and 104"),
        (
            "num_items",
            (),
            lambda x: x - 1,
            0,
            "no item covers tokens 24 to 24 for row 1 at position 24",
        ),
    ],
)
def test_a_wrong_item_is_named(field, index, value, which, message):
    with pytest.raises(ValueError, match=message):
        check_values(**changed(field, index, value, which))


def test_without_owners_a_double_cover_is_still_found():
    found = changed("row_start", 0, 1) | {"sequence_of_row": None}
    with pytest.raises(ValueError, match="no item covers tokens 16 to 18 for row 0"):
        check_values(**found)
    found = changed("kv_start", 2, 12) | {"sequence_of_row": None}
    with pytest.raises(ValueError, match=r"(more than one item covers|it must have)"):
        check_values(**found)


@pytest.mark.parametrize(
    ("place", "page", "message"),
    [
        ((1, 4), 1000, r"reads page_table\[1, 4\], which is 1000; the pool has pages 0 to 999"),
        ((0, 0), -1, r"page_table\[0, 0\], which is -1"),
        ((1, 1), 7, "row 1 of sequence 1 reads tokens 0 to 7 by the table of sequence 0"),
    ],
)
def test_a_wrong_page_is_named(place, page, message):
    found = batch(16, [3, 9, 1, 6], [1, 1, 1, 1])
    found["page_table"][place] = page
    with pytest.raises(ValueError, match=message):
        check_values(**found)


def test_positions_and_plan_must_fit():
    found = batch(16, [3, 9, 1, 6], [1, 1, 1, 1])
    far = found["positions"].copy()
    far[2] = 32
    with pytest.raises(ValueError, match="row 2 is at position 32; a table of 8 pages of 4 tokens"):
        check_values(**found | {"positions": far})
    far[2] = 20
    with pytest.raises(ValueError, match="no item covers tokens 17 to 20 for row 2"):
        check_values(**found | {"positions": far})
    with pytest.raises(ValueError, match="the plan is for 6 rows; there are 5 positions"):
        check_values(**found | {"positions": far[:5], "sequence_of_row": None})
    # A window that ends behind the gap hides it.
    gap = changed("kv_start", 1, 20)
    check_values(**gap, sliding_window=5)
    with pytest.raises(ValueError, match="no item covers tokens 19 to 19 for row 1"):
        check_values(**gap, sliding_window=6)


def without_the_first(indptr, slots):
    slots[:-1] = slots[1:]
    indptr[1:] -= 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda indptr, slots: indptr.__setitem__(0, 1), "merge_indptr goes from 1"),
        (lambda indptr, slots: indptr.__setitem__(-1, 10**6), "to 1000000; it must rise"),
        (lambda indptr, slots: slots.__setitem__(0, slots[1]), "row 0 merges slot .* twice"),
        (lambda indptr, slots: slots.__setitem__(0, 10**6), "slot 1000000, which no item computes"),
        (lambda indptr, slots: slots.__setitem__(0, -1), "slot -1, which no item computes"),
        (without_the_first, "row 0 does not merge slot .*, its result for tokens 0 to 7"),
    ],
)
def test_a_wrong_merge_is_named(change, message):
    found = batch(16, [3, 9, 1, 6], [1, 1, 1, 1])
    indptr, slots = found["plan"].merge_indptr.copy(), found["plan"].merge_slots.copy()
    change(indptr, slots)
    plan = dataclasses.replace(found["plan"], merge_indptr=indptr, merge_slots=slots)
    with pytest.raises(ValueError, match=message):
        check_values(**found | {"plan": plan})


def test_writes_have_places_of_their_own():
    check_writes(np.array([-1, 0, 39, 5, -1]), num_pages=10, page_size=4)
    with pytest.raises(ValueError, match=r"row 2 writes to slot 40; .* slots 0 to 39"):
        check_writes(np.array([-1, 0, 40]), num_pages=10, page_size=4)
    with pytest.raises(ValueError, match="rows 1 and 3 both write to slot 7"):
        check_writes(np.array([-1, 7, 8, 7]), num_pages=10, page_size=4)


@pytest.mark.parametrize(
    ("q", "pages", "message"),
    [
        ((6, 4, 8), (9, 3, 4, 8), "4 query heads do not divide into 3 KV heads"),
        ((6, 4, 8), (9, 2, 3, 8), "split at 8 tokens; with pages of 3"),
        ((5, 4, 8), (9, 2, 4, 8), "the plan is for 6 rows; q has 5"),
        ((6, 4, 8), (9, 2, 4, 16), "as q's head dim is 8"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(q, pages, message):
    """Where annotations are not checked, as outside of tests."""
    plan = batch(16, [3, 9, 1, 6], [1, 1, 1, 1])["plan"]
    with pytest.raises(ValueError, match=message):
        check_shapes(jnp.zeros(q), jnp.zeros(pages), jnp.zeros(pages), plan)
