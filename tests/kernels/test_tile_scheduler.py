"""The tile scheduler, run in plain JAX: the kernel calls the same functions."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rjax.pallas_kernels.attention.mosaic.tile_scheduler import TileScheduler

ROUNDS = 5


@functools.partial(jax.jit, static_argnums=(1, 2))
def scheduled(schedule, num_ctas: int, can_reverse: bool):
    """(work tile indices [rounds, num_ctas], which of them each CTA takes)."""
    scheduler = TileScheduler.of(jnp.arange(num_ctas), num_ctas, schedule, can_reverse)
    number = jnp.arange(ROUNDS)[:, None]
    return scheduler.tile_index(number), number < scheduler.num_tiles


@pytest.mark.parametrize("can_reverse", [False, True])
@pytest.mark.parametrize("num_ctas", [1, 2, 7, 132])
@given(data=st.data())
def test_each_work_tile_is_taken_once(num_ctas, can_reverse, data):
    tiles = data.draw(st.integers(0, (ROUNDS - 1) * num_ctas))
    cooperative = data.draw(st.integers(0, tiles))
    reverse = data.draw(st.integers(0, 1))
    schedule = jnp.array([tiles, cooperative, reverse])
    index, taken = scheduled(schedule, num_ctas, can_reverse)
    np.testing.assert_array_equal(np.sort(np.asarray(index)[np.asarray(taken)]), np.arange(tiles))


def tiles_of_ctas(tiles: int, cooperative: int, reverse: int):
    index, taken = scheduled(jnp.array([tiles, cooperative, reverse]), 4, True)
    return [np.asarray(index)[np.asarray(taken)[:, c], c].tolist() for c in range(4)]


def test_a_last_round_of_head_pairs_goes_to_the_last_ctas():
    assert tiles_of_ctas(6, 4, 0) == [[0], [1], [2, 5], [3, 4]]
    assert tiles_of_ctas(6, 5, 0) == [[0, 4], [1, 5], [2], [3]]  # one of the last two is not one
    assert tiles_of_ctas(6, 6, 0) == [[0, 4], [1, 5], [2], [3]]
    assert tiles_of_ctas(2, 0, 0) == [[], [], [1], [0]]


def test_odd_ctas_go_backwards():
    assert tiles_of_ctas(10, 4, 1) == [[0, 4], [5, 1], [2, 6, 9], [8, 7, 3]]
