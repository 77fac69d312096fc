"""The arrays that live on the device from step to step."""

import contextlib
import dataclasses
from collections.abc import Mapping
from typing import no_type_check

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from rjax.batch.page_groups import PageGroups
from rjax.batch.step_worker import PoolSize
from rjax.models import ModelConfig
from rjax.pallas_kernels.gated_delta.states import LayerStates
from rjax.pallas_kernels.residual.peers import Peers
from rjax.sampling import SamplingState, SlotRow, admit, init_state
from rjax.worker.pages.pools import Pools, make_pools
from rjax.worker.pages.states import make_states


@no_type_check  # JAX rebuilds it with descriptions of arrays for leaves
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepState:
    """The arrays that live on the device from step to step; they are donated to each step.

    Attributes:
        k_pages, v_pages: one pool a layer.
        sampling: a row for each slot.
        last_tokens: the token last sampled for each slot, input of the next step.
        peers: exchange buffers of the mesh; None without.
        states: the states of each layer that has them in place of KV.
    """

    k_pages: list[Float[Array, "P K S H"]]
    v_pages: list[Float[Array, "P K S H"]]
    sampling: SamplingState
    last_tokens: Int[Array, " slots"]
    peers: Peers | None = None
    states: list[LayerStates] = dataclasses.field(default_factory=list)


class DeviceState:
    """Holds the KV pools, the sampling state and the last tokens.

    Programs donate what they replace, so only the newest arrays are valid: read ``arrays`` at each
    use, and store what a program returns.

    Attributes:
        arrays: the device arrays, as the program dispatched last leaves them.
    """

    def __init__(self, arrays: StepState) -> None:
        self.arrays = arrays

    @property
    def pools(self) -> Pools:
        """All pools, K first, then V."""
        return [*self.arrays.k_pages, *self.arrays.v_pages]

    def set_pools(self, pools: Pools) -> None:
        """Store all pools, in the order of ``pools``."""
        layers = len(pools) // 2
        self.arrays = dataclasses.replace(
            self.arrays, k_pages=pools[:layers], v_pages=pools[layers:]
        )

    def set_states(self, states: list[LayerStates]) -> None:
        """Store the states of all layers that have them."""
        self.arrays = dataclasses.replace(self.arrays, states=states)

    def set_sampling(
        self, sampling: SamplingState, last_tokens: Int[Array, " slots"] | None = None
    ) -> None:
        """Store the sampling state and, if given, the last token of each slot."""
        if last_tokens is None:
            last_tokens = self.arrays.last_tokens
        self.arrays = dataclasses.replace(self.arrays, sampling=sampling, last_tokens=last_tokens)

    def wait(self) -> None:
        """Wait until the device has computed the arrays; an error of a step is not raised here."""
        with contextlib.suppress(RuntimeError):
            jax.block_until_ready(self.arrays)

    def drop(self) -> None:
        """Give back all arrays but the exchange buffers, whose addresses programs hold."""
        dropped: StepState = jax.tree.map(lambda _: None, self.arrays)
        self.arrays = dataclasses.replace(dropped, peers=self.arrays.peers)

    def admit(self, rows: Mapping[int, SlotRow]) -> None:
        """Fill slots of the sampling state; nothing of their last sequences remains."""
        self.set_sampling(admit(self.arrays.sampling, rows))


def make_step_state(
    model: ModelConfig,
    groups: PageGroups,
    *,
    pool: PoolSize,
    page_size: int,
    num_slots: int,
    dtype: jnp.dtype,
    kv_dtype: jnp.dtype,
    mesh: Mesh,
    peers: Peers | None = None,
) -> StepState:
    """Empty pools and empty slots on the devices of the mesh, and its exchange buffers."""
    k_pages, v_pages = make_pools(model, groups, pool.num_pages, page_size, kv_dtype, mesh)
    states: list[LayerStates] = []
    if pool.states is not None:
        states = make_states(
            model,
            num_states=pool.states.num_states,
            num_slots=num_slots,
            page_size=page_size,
            dtype=dtype,
            mesh=mesh,
        )
    sampling, last_tokens = jax.device_put(
        (init_state(num_slots, model.vocab_size), jnp.zeros(num_slots, jnp.int32)),
        NamedSharding(mesh, PartitionSpec()),
    )
    return StepState(k_pages, v_pages, sampling, last_tokens, peers, states)
