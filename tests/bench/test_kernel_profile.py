"""Times of kernels that overlap."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.kernels.kernel_profile import spent_by_name


def test_time_counts_for_the_kernel_that_ends_first():
    spans = [("gemm", 0, 10), ("norm", 2, 12), ("gemm", 11, 20), ("copy", 30, 31)]
    assert spent_by_name(spans) == {"gemm": 18, "norm": 2, "copy": 1}
    assert spent_by_name([("outer", 0, 10), ("inner", 2, 4)]) == {"outer": 8, "inner": 2}


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 30), st.integers(0, 9))))
def test_times_add_up_to_those_in_which_any_ran(drawn):
    spans = [(name, start, start + length) for name, start, length in drawn]
    covered = {moment for _, start, stop in spans for moment in range(start, stop)}
    assert sum(spent_by_name(spans).values()) == pytest.approx(len(covered))
