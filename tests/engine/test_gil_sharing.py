"""The interpreter's switch interval while programs are lowered."""

import sys

import pytest

from rjax.worker.gil_sharing import quick_switches


@pytest.fixture(autouse=True)
def _own_interval():
    before = sys.getswitchinterval()
    yield
    sys.setswitchinterval(before)


@pytest.mark.parametrize(("own", "inside"), [(0.005, 0.0001), (0.00002, 0.00002)])
def test_the_interval_is_short_until_the_last_block_ends(own, inside):
    sys.setswitchinterval(own)
    first, second = quick_switches(), quick_switches()
    first.__enter__()
    second.__enter__()
    assert sys.getswitchinterval() == pytest.approx(inside, rel=0.1)
    first.__exit__(None, None, None)
    assert sys.getswitchinterval() == pytest.approx(inside, rel=0.1)
    second.__exit__(None, None, None)
    assert sys.getswitchinterval() == pytest.approx(own, rel=0.1)
