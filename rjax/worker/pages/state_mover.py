"""Copies the states of sequences to host memory and back."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Int

from rjax.batch.page_operations import StateOperation, SwapInState, SwapOutState
from rjax.pallas_kernels.gated_delta.states import LayerStates
from rjax.worker.pages.host_memory import CopiesInFlight, host_sharding, to_host
from rjax.worker.pages.states import STATES
from rjax.worker.programs.background_compiler import CompileTask

type Parts = list[Array]
"""One array [L, ...] for each field of `LayerStates` that is copied."""
type Fields = tuple[str, ...]

_OF_PAGE: Fields = ("states", "conv_ends")
_OF_SLOT: Fields = ("keys", "values", "updates", "gates", "recent")
_MAX_IN_FLIGHT = 2  # copies of a state or a tail


@functools.partial(jax.jit, static_argnums=2)
def _gather(
    pools: list[list[Array]], index: Int[Array, ""], shardings: tuple[NamedSharding, ...]
) -> Parts:
    parts = [jnp.stack([pool[index] for pool in field]) for field in pools]
    return [
        jax.lax.with_sharding_constraint(part, sharding)
        for part, sharding in zip(parts, shardings, strict=True)
    ]


@functools.partial(jax.jit, donate_argnums=0)
def _scatter(pools: list[list[Array]], index: Int[Array, ""], parts: Parts) -> list[list[Array]]:
    return [
        [pool.at[index].set(part[i], mode="drop") for i, pool in enumerate(field)]
        for field, part in zip(pools, parts, strict=True)
    ]


class StateMover:
    """Moves states between the device and slots of host memory, each for one sequence.

    A host slot holds the state page of a sequence, the tail of its sampler slot, or both; bits are
    kept. Operations are dispatched in order and return at once, as those of `PageMover` do.

    Args:
        num_slots: host slots. A slot's memory is allocated at its first use and kept.
        mesh: the devices, which share the states by key heads.

    Raises:
        InvalidConfigError: there are host slots, and the devices reach no page-locked host memory.
    """

    def __init__(self, num_slots: int, mesh: Mesh) -> None:
        self._fields = {
            fields: tuple(NamedSharding(mesh, getattr(STATES, name)) for name in fields)
            for fields in (_OF_PAGE, _OF_SLOT)
        }
        self._on_host = {}
        if num_slots:
            self._on_host = {
                fields: [host_sharding(sharding) for sharding in shardings]
                for fields, shardings in self._fields.items()
            }
        self._slots: dict[int, dict[Fields, Parts]] = {}
        self._in_flight = CopiesInFlight(_MAX_IN_FLIGHT)

    def run(self, states: list[LayerStates], operations: list[StateOperation]) -> list[LayerStates]:
        """Dispatch the operations; ``states`` is donated where they write.

        Raises:
            OutOfMemoryError: the system or XLA's limit allows no more page-locked memory.
        """
        for operation in operations:
            parts = (_OF_PAGE, operation.page), (_OF_SLOT, operation.slot)
            match operation:
                case SwapOutState(host_slot=host_slot):
                    self._slots[host_slot] = {}  # frees its memory for the new state
                    for fields, index in parts:
                        if index is not None:
                            self._slots[host_slot][fields] = self._out(states, fields, index)
                case SwapInState(host_slot=host_slot):
                    for fields, index in parts:
                        if index is not None:
                            found = self._slots[host_slot][fields]
                            states = self._in(states, fields, index, found)
        return states

    def forget(self) -> None:
        """Free the memory of all host slots, after the copies in flight."""
        self._in_flight.wait_for_all()
        self._slots.clear()

    def warmup(self, states: list[LayerStates]) -> list[LayerStates]:
        """Run each copy; nothing is written."""
        for fields, on_host in self._on_host.items():
            pools = _pools(states, fields)
            parts = _gather(pools, np.int32(0), self._fields[fields])
            back = jax.device_put(to_host(parts, on_host), list(self._fields[fields]))
            states = _with_pools(states, fields, _scatter(pools, np.int32(len(pools[0][0])), back))
        return states

    def programs(self, states: list[LayerStates]) -> list[tuple[str, CompileTask]]:
        """The name of each copy's program and how it is made, from the shapes of the states."""
        found: list[tuple[str, CompileTask]] = []
        for fields in self._on_host:
            pools, shardings = _pools(states, fields), self._fields[fields]
            kind = "state" if fields == _OF_PAGE else "tail"
            gather = functools.partial(_gather.lower, pools, np.int32(0), shardings)
            parts = [
                jax.ShapeDtypeStruct(
                    (len(field), *field[0].shape[1:]), field[0].dtype, sharding=sharding
                )
                for field, sharding in zip(pools, shardings, strict=True)
            ]
            scatter = functools.partial(_scatter.lower, pools, np.int32(0), parts)
            found.append((f"gather {kind}", CompileTask(gather)))
            found.append((f"scatter {kind}", CompileTask(scatter)))
        return found

    def _out(self, states: list[LayerStates], fields: Fields, index: int) -> Parts:
        self._in_flight.wait_for_room()
        parts = _gather(_pools(states, fields), np.int32(index), self._fields[fields])
        away = to_host(parts, self._on_host[fields])
        self._in_flight.add(away)
        return away

    def _in(
        self, states: list[LayerStates], fields: Fields, index: int, parts: Parts
    ) -> list[LayerStates]:
        self._in_flight.wait_for_room()
        back = jax.device_put(parts, list(self._fields[fields]))
        self._in_flight.add(back)
        written = _scatter(_pools(states, fields), np.int32(index), back)
        return _with_pools(states, fields, written)


def _pools(states: list[LayerStates], fields: Fields) -> list[list[Array]]:
    return [[getattr(layer, name) for layer in states] for name in fields]


def _with_pools(
    states: list[LayerStates], fields: Fields, pools: list[list[Array]]
) -> list[LayerStates]:
    of_layers = zip(*pools, strict=True)
    return [
        dataclasses.replace(layer, **dict(zip(fields, found, strict=True)))
        for layer, found in zip(states, of_layers, strict=True)
    ]
