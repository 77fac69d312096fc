"""Memory through which the devices of a mesh send each other numbers over NVLink."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int32

from rjax.models.sharding import TENSOR_AXIS
from rjax.pallas_kernels.mosaic.words import EMPTY
from rjax.pallas_kernels.residual.peers import (
    Peers,
    buffer_words,
    update_capacity,
)


class PeerMemory:
    """Owns the exchange buffer of each device of a mesh.

    Kernels write it through its address. XLA knows nothing of that, so the buffers are no operands
    of any program: keep this object until the last program that uses its `Peers` has ended.
    `allocate` returns both, so that neither is made without the other.
    """

    def __init__(self, buffers: Int32[Array, "X W"]) -> None:
        self._buffers = buffers

    @classmethod
    def allocate(cls, mesh: Mesh, max_numbers: int) -> tuple["PeerMemory", Peers]:
        """(the owner of new buffers, what programs need to use them).

        One process must own all devices of the mesh; XLA enables access between them.

        Args:
            mesh: the devices, with the axis ``tensor`` alone.
            max_numbers: most numbers of an update, such as rows times hidden size.
        """
        n = mesh.size
        capacity = min(update_capacity(n), -(-max_numbers // 128) * 128)
        sharding = NamedSharding(mesh, PartitionSpec(TENSOR_AXIS))
        shape = (n, buffer_words(n, capacity))
        fill = jax.jit(lambda: jnp.full(shape, EMPTY, jnp.int32), out_shardings=sharding)
        memory = cls(jax.block_until_ready(fill()))
        words = np.array(memory.addresses(mesh), np.uint64)[:, None].view(np.int32)  # low first
        rows = [np.concatenate([words, [[i, 0]]]) for i in range(n)]
        table, state = np.stack(rows).astype(np.int32), np.zeros((n, 2), np.int32)
        table, state = jax.device_put((table, state), sharding)
        return memory, Peers(table, state, capacity)

    def addresses(self, mesh: Mesh) -> list[int]:
        """Addresses of the buffers, in the order of the devices of the mesh."""
        shards = {shard.device: shard.data for shard in self._buffers.addressable_shards}
        return [shards[device].unsafe_buffer_pointer() for device in mesh.devices.flat]

    @property
    def bytes_per_device(self) -> int:
        """Bytes of the exchange buffer of one device."""
        return self._buffers.nbytes // len(self._buffers.addressable_shards)


def make_peer_memory(mesh: Mesh, max_numbers: int) -> tuple[PeerMemory | None, Peers | None]:
    """`PeerMemory.allocate` for several GPUs of this process; (None, None) for other meshes."""
    local = all(device.process_index == jax.process_index() for device in mesh.devices.flat)
    on_gpus = mesh.devices.flat[0].platform == "gpu"
    if mesh.size > 1 and mesh.shape[TENSOR_AXIS] == mesh.size and local and on_gpus:
        return PeerMemory.allocate(mesh, max_numbers)
    return None, None
