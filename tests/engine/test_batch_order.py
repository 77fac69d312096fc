"""Sequences with a shared prefix are adjacent in the batch, at every KV split."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rjax.worker.step.batch_order import by_shared_pages
from tests.properties import num_examples

# A stand-in for a scheduled sequence has what is read of it, and not its type.
pytestmark = pytest.mark.usefixtures("no_annotations_checked")

PAGE, MOST = 2, 12  # tokens a page; pages of a sequence


@settings(max_examples=num_examples(200))
@given(
    tails=st.lists(
        st.tuples(st.integers(0, 99), st.integers(0, MOST), st.integers(1, MOST * PAGE)),
        min_size=1,
        max_size=10,
    ),
    pages_a_split=st.sampled_from([1, 2, 3]),
    seed=st.integers(0, 9),
)
def test_equal_pages_are_adjacent_at_every_kv_split(tails, pages_a_split, seed):
    rng = np.random.default_rng(seed)
    tables = rng.permutation(len(tails) * MOST).reshape(-1, MOST)
    stops = np.array([stop for _, _, stop in tails])
    for b, (other, shared, _) in enumerate(tails):
        if b:  # of a prefix tree: the first pages of one that is there
            common = min(shared, stops[b] // PAGE, stops[other % b] // PAGE)
            tables[b, :common] = tables[other % b, :common]
    batch = [
        SimpleNamespace(sequence=SimpleNamespace(slot=slot), stop=int(stops[slot]))
        for slot in rng.permutation(len(tails))
    ]
    found = by_shared_pages(batch, tables, page_size=PAGE, kv_split=PAGE * pages_a_split)
    slots = [item.sequence.slot for item in found]
    assert sorted(slots) == list(range(len(tails)))
    for end in range(pages_a_split, MOST + 1, pages_a_split):
        pages = [tables[s, end - 1] for s in slots if stops[s] >= end * PAGE]
        alone = [a for a, b in zip(pages, [None, *pages], strict=False) if a != b]
        assert len(set(alone)) == len(alone)
