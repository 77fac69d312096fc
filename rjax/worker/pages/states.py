"""The states of a model: their arrays on the devices, and the bytes that they take."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, UInt8

from rjax.models import LinearAttentionConfig, ModelConfig
from rjax.models.layers.parameter import array_bytes
from rjax.models.sharding import TENSOR_AXIS
from rjax.pallas_kernels.gated_delta.states import LayerStates, state_shapes

_SPECS: dict[str, Any] = {
    "states": PartitionSpec(None, TENSOR_AXIS),
    "conv_ends": PartitionSpec(None, None, TENSOR_AXIS),
    "keys": PartitionSpec(None, TENSOR_AXIS),
    "values": PartitionSpec(None, TENSOR_AXIS),
    "updates": PartitionSpec(None, TENSOR_AXIS),
    "gates": PartitionSpec(None, TENSOR_AXIS),
    "recent": PartitionSpec(None, None, TENSOR_AXIS),
}
STATES = LayerStates(**_SPECS)
"""How the devices of a mesh share the states: each has those of its own key heads."""


def state_bytes(model: ModelConfig, *, page_size: int, dtype: jnp.dtype) -> tuple[int, int]:
    """(bytes of a state page, bytes of a slot), over all layers and devices."""
    linear = model.linear
    assert linear is not None
    shapes = [
        layer_shapes(linear, num_states=n, num_slots=m, page_size=page_size, dtype=dtype)
        for n, m in ((1, 0), (0, 1))
    ]
    of_page, of_slot = (sum(linear.layers) * array_bytes(each) for each in shapes)
    return of_page, of_slot


def make_states(
    model: ModelConfig,
    *,
    num_states: int,
    num_slots: int,
    page_size: int,
    dtype: jnp.dtype,
    mesh: Mesh,
) -> list[LayerStates]:
    """States of zeros of all layers that have them, sharded over their key heads."""
    linear = model.linear
    assert linear is not None
    make = _maker(linear, num_states, num_slots, page_size, jnp.dtype(dtype), mesh)
    return [make() for _ in range(sum(linear.layers))]


@functools.lru_cache(maxsize=8)  # states that are made again need no compilation
def _maker(
    linear: LinearAttentionConfig,
    num_states: int,
    num_slots: int,
    page_size: int,
    dtype: jnp.dtype,
    mesh: Mesh,
) -> Callable[[], LayerStates]:
    shapes = layer_shapes(
        linear, num_states=num_states, num_slots=num_slots, page_size=page_size, dtype=dtype
    )
    shardings = jax.tree.map(
        lambda spec: NamedSharding(mesh, spec),
        STATES,
        is_leaf=lambda leaf: isinstance(leaf, PartitionSpec),
    )

    def zeros() -> LayerStates:
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

    return jax.jit(zeros, out_shardings=shardings)


def read_state(states: list[LayerStates], page: int) -> UInt8[np.ndarray, " X"]:
    """The bytes of a state page: layer by layer, the state and the convolution's last inputs."""
    found = [part for layer in states for part in (layer.states[page], layer.conv_ends[page])]
    return np.concatenate([np.asarray(part).reshape(-1).view(np.uint8) for part in found])


def write_state(
    states: list[LayerStates], page: int, data: UInt8[np.ndarray, " X"]
) -> list[LayerStates]:
    """The states with the bytes of `read_state` in a state page."""
    written, start = [], 0

    def put(pool: Array) -> Array:
        nonlocal start
        shape = pool.shape[1:]
        stop = start + math.prod(shape) * pool.dtype.itemsize
        value = data[start:stop].view(pool.dtype).reshape(shape)
        start = stop
        return pool.at[page].set(value)

    for layer in states:
        of_page = put(layer.states), put(layer.conv_ends)
        written.append(dataclasses.replace(layer, states=of_page[0], conv_ends=of_page[1]))
    return written


def layer_shapes(
    linear: LinearAttentionConfig,
    *,
    num_states: int,
    num_slots: int,
    page_size: int,
    dtype: jnp.dtype,
) -> LayerStates:
    return state_shapes(
        (linear.key_heads, linear.key_dim, linear.values_a_key, linear.value_dim),
        taps=linear.taps,
        num_states=num_states,
        num_slots=num_slots,
        page_size=page_size,
        dtype=dtype,
    )
