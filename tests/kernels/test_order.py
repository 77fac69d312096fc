"""The turns of the programs, which the kernel takes by the same functions."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels.attention.mosaic.order import Turns

ROUNDS = 5


@functools.partial(jax.jit, static_argnums=(1, 2))
def taken(order, programs: int, turns: bool):
    """(units [rounds, programs], which of them each program comes to)."""
    mine = Turns.of(jnp.arange(programs), programs, order, turns)
    number = jnp.arange(ROUNDS)[:, None]
    return mine.unit(number), number < mine.count


@pytest.mark.parametrize("turns", [False, True])
@pytest.mark.parametrize("programs", [1, 2, 7, 132])
@given(data=st.data())
def test_each_unit_is_taken_once(programs, turns, data):
    units = data.draw(st.integers(0, (ROUNDS - 1) * programs))
    wide, turned = data.draw(st.integers(0, units)), data.draw(st.integers(0, 1))
    place, there = taken(jnp.array([units, wide, turned]), programs, turns)
    np.testing.assert_array_equal(np.sort(np.asarray(place)[np.asarray(there)]), np.arange(units))


def in_order(units: int, wide: int, turned: int):
    place, there = taken(jnp.array([units, wide, turned]), 4, True)
    return [np.asarray(place)[np.asarray(there)[:, p], p].tolist() for p in range(4)]


def test_a_last_round_of_paired_units_is_for_the_last_programs():
    assert in_order(6, 4, 0) == [[0], [1], [2, 5], [3, 4]]
    assert in_order(6, 5, 0) == [[0, 4], [1, 5], [2], [3]]  # one of the last two is wide
    assert in_order(6, 6, 0) == [[0, 4], [1, 5], [2], [3]]
    assert in_order(2, 0, 0) == [[], [], [1], [0]]


def test_every_second_program_goes_backwards():
    assert in_order(10, 4, 1) == [[0, 4], [5, 1], [2, 6, 9], [8, 7, 3]]
