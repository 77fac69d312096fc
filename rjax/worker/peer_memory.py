"""Memory through which the devices of a mesh sum their shares over NVLink."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rjax.models.sharding import TENSOR_AXIS
from rjax.pallas_kernels.all_reduce_rms_norm.peers import (
    EMPTY,
    Peers,
    buffer_words,
    update_capacity,
)


class PeerMemory:
    """Holds the exchange buffer of each device, which kernels write through its address.

    One process must own all devices of the mesh. XLA enables access between the devices of a
    process; it knows nothing of the writes, so the buffers are no operands of any program. Keep
    this object until the last program that uses ``peers`` has ended.

    Args:
        mesh: the devices, with the axis ``tensor`` alone.
        max_numbers: of an update, such as rows times hidden size.
    """

    def __init__(self, mesh: Mesh, max_numbers: int) -> None:
        n = mesh.size
        self._capacity = min(update_capacity(n), -(-max_numbers // 128) * 128)
        sharding = NamedSharding(mesh, PartitionSpec(TENSOR_AXIS))
        shape = (n, buffer_words(n, self._capacity))
        fill = jax.jit(lambda: jnp.full(shape, EMPTY, jnp.int32), out_shardings=sharding)
        self._buffers = jax.block_until_ready(fill())
        shards = {shard.device: shard.data for shard in self._buffers.addressable_shards}
        addresses = [shards[device].unsafe_buffer_pointer() for device in mesh.devices.flat]
        words = np.array(addresses, np.uint64)[:, None].view(np.int32)  # low word first
        rows = [np.concatenate([words, [[i, 0]]]) for i in range(n)]
        table, state = np.stack(rows).astype(np.int32), np.zeros((n, 2), np.int32)
        table, state = jax.device_put((table, state), sharding)
        self.peers = Peers(table, state, self._capacity)

    @property
    def bytes_per_device(self) -> int:
        """Of the exchange buffer."""
        return self._buffers.nbytes // len(self._buffers.addressable_shards)


def make_peer_memory(mesh: Mesh, max_numbers: int) -> PeerMemory | None:
    """The exchange buffers of a mesh of several GPUs of this process; None for other meshes."""
    local = all(device.process_index == jax.process_index() for device in mesh.devices.flat)
    on_gpus = mesh.devices.flat[0].platform == "gpu"
    return PeerMemory(mesh, max_numbers) if mesh.size > 1 and local and on_gpus else None
