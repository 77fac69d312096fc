"""States go to the host and come back with every bit, and touch nothing else."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from rjax.batch.page_operations import SwapInState, SwapOutState
from rjax.errors import InvalidConfigError
from rjax.pallas_kernels.gated_delta.states import LayerStates, state_shapes
from rjax.worker.pages import host_memory
from rjax.worker.pages.state_mover import StateMover

STATES, SLOTS = 5, 3
MESH = Mesh(np.array(jax.devices()[:1]), ("tensor",))
OF_PAGE = ("states", "conv_ends")


def random_states(seed: int) -> list[LayerStates]:
    """Two layers of random numbers, NaN among them."""
    draw = np.random.default_rng(seed)
    shapes = state_shapes(
        (2, 4, 2, 8), taps=4, num_states=STATES, num_slots=SLOTS, page_size=8, dtype=jnp.bfloat16
    )

    def numbers(leaf):
        found = draw.normal(size=leaf.shape)
        found[draw.random(leaf.shape) < 0.1] = np.nan
        return jnp.asarray(found, leaf.dtype)

    return [jax.tree.map(numbers, shapes) for _ in range(2)]


def raw(states: list[LayerStates]) -> list[dict[str, np.ndarray]]:
    """The bits of every array."""
    return [
        {
            field.name: np.array(getattr(layer, field.name)).view(np.uint8)
            for field in dataclasses.fields(layer)
        }
        for layer in states
    ]


def test_a_state_comes_back_in_another_place():
    states = random_states(0)
    want = raw(states)
    mover = StateMover(3, MESH)
    out = [SwapOutState(4, 1, 0), SwapOutState(None, 2, 1), SwapOutState(3, None, 2)]
    states = mover.run(states, out)
    states = mover.run(mover.warmup(states), [SwapOutState(0, 0, 1)])  # a slot that is used again
    back = [SwapInState(0, 2, 0), SwapInState(2, 4, None), SwapInState(1, 1, 2)]
    found = raw(mover.run(states, back))
    for before, after in zip(want, found, strict=True):
        for name, old in before.items():
            new = old.copy()
            for source, target in [(4, 2), (3, 4), (0, 1)] if name in OF_PAGE else [(1, 0), (0, 2)]:
                new[target] = old[source]
            np.testing.assert_array_equal(after[name], new, err_msg=name)


def test_nothing_is_compiled_after_a_warmup():
    mover, found = StateMover(2, MESH), []
    states = mover.warmup(random_states(1))

    def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event.endswith("backend_compile_duration"):
            found.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        mover.run(states, [SwapOutState(1, 1, 0), SwapInState(0, 2, 2)])
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert found == []


def test_programs_are_those_that_run():
    states = random_states(2)
    names = [name for name, _ in StateMover(2, MESH).programs(states)]
    assert names == ["gather state", "scatter state", "gather tail", "scatter tail"]
    assert StateMover(0, MESH).programs(states) == []


def test_a_platform_without_page_locked_memory_is_told_of(monkeypatch):
    monkeypatch.setattr(host_memory, "_HOST_KIND", "elsewhere")
    with pytest.raises(InvalidConfigError, match="set swap_space=0"):
        StateMover(1, MESH)
