"""Flat logprobs are the list of their positions' mappings, in every respect that users see."""

import copy

from hypothesis import given
from hypothesis import strategies as st

from rjax.outputs import FlatLogprobs, Logprob, num_entries, token_chances

POSITIONS = st.lists(
    st.tuples(
        st.integers(0, 9),
        st.lists(st.integers(0, 9), max_size=5, unique=True),
    ),
    max_size=6,
)


def text(token: int) -> str:
    return f"<{token}>"


def make(positions: list[tuple[int, list[int]]]) -> tuple[FlatLogprobs, list[dict[int, Logprob]]]:
    flat, want = FlatLogprobs(text), []
    for sampled, top in positions:
        values = [-0.5 * i for i in range(len(top))]
        rank = top.index(sampled) + 1 if sampled in top else 7
        flat.add((sampled, -3.0, rank), top, values)
        entry = {sampled: Logprob(-3.0, rank, text(sampled))}
        for place, other in enumerate(top):
            if other != sampled:
                entry[other] = Logprob(values[place], place + 1, text(other))
        want.append(entry)
    return flat, want


@given(positions=POSITIONS, more=POSITIONS, cut=st.slices(6))
def test_it_is_the_list(positions, more, cut) -> None:
    flat, want = make(positions)
    assert (flat == want, want == flat, len(flat)) == (True, True, len(want))
    assert [list(entry) for entry in flat] == [list(entry) for entry in want]
    assert flat[cut] == want[cut]
    assert [flat[i] for i in range(-len(want), len(want))] == want * 2
    assert repr(flat) == repr(want)
    assert num_entries(flat) == num_entries(want)
    assert token_chances(flat) == token_chances(want)
    assert flat.sampled() == [-3.0] * len(want)
    copied = copy.deepcopy(flat)  # as pickle does
    assert (type(copied), copied) == (list, want)
    other, other_want = make(more)
    assert flat + other == want + other_want
    assert want + other == want + other_want
    assert (flat != other) == (want != other_want)
    before = flat[:]
    flat += other
    assert flat == want + other_want
    assert before == want
