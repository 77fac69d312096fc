"""Host memory of the blocks on their way from the files to the devices."""

import abc
import collections
import contextlib
import mmap
from collections.abc import Callable

import jax
import numpy as np
from jax.sharding import Mesh

from rjax.models.loading.blocks import Block

_BLOCK_BYTES = 32 << 20


class HostBuffers(abc.ABC):
    """Read blocks into host memory and copy them to the devices, from several threads.

    Attributes:
        block_bytes: larger pieces are split into blocks of about this size; None to split none.
        ahead_bytes, reserves: see `Pipeline`.
    """

    block_bytes: int | None
    ahead_bytes: int
    reserves: bool

    @abc.abstractmethod
    def load(self, block: Block, check: Callable[[], None]) -> jax.Array:
        """Read the block and return its array, ready; ``check`` may raise meanwhile."""


class ReusedBuffers(HostBuffers):
    """One buffer for each thread, reused for its next block once the devices have the last one.

    The host holds at most ``block_bytes`` for each thread, or one row if that is larger.

    For devices with their own memory: an array must not share its buffer.
    """

    ahead_bytes = 512 << 20  # of device memory; two blocks for each thread
    reserves = True

    def __init__(self, block_bytes: int = _BLOCK_BYTES) -> None:
        self.block_bytes = block_bytes
        self._size = block_bytes
        self._free: collections.deque[np.ndarray] = collections.deque()

    def load(self, block: Block, check: Callable[[], None]) -> jax.Array:
        """Read the block into a free buffer and wait until the devices have it."""
        try:
            memory = self._free.pop()
        except IndexError:
            memory = _map_memory(self._size)
        if memory.nbytes < block.size:  # of a single row
            memory = _map_memory(block.size)
        block.read(memory[: block.size], check)
        host = memory[: block.size].view(block.dtype).reshape(block.shape)
        array = self.copy(host, block)
        array.block_until_ready()  # until then the copy reads the buffer
        self._free.append(memory)
        return array

    def copy(self, host: np.ndarray, block: Block) -> jax.Array:
        """Start the copy of the block to its devices."""
        return jax.device_put(host, block.sharding)


class AdoptedBuffers(HostBuffers):
    """A new buffer for each piece, which its array keeps: for the CPU, where no copy is needed."""

    block_bytes = None
    ahead_bytes = 0
    reserves = False

    def load(self, block: Block, check: Callable[[], None]) -> jax.Array:
        """Read the block into new memory and make it an array."""
        memory = _map_memory(block.size)
        block.read(memory, check)
        host = memory.view(block.dtype).reshape(block.shape)
        return jax.device_put(host, block.sharding).block_until_ready()


def host_buffers(mesh: Mesh) -> HostBuffers:
    """The buffers for the devices of the mesh."""
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    return AdoptedBuffers() if on_cpu else ReusedBuffers()


def _map_memory(size: int) -> np.ndarray:
    """New memory of ``size`` bytes, aligned to a page, which the system gets back when it is freed.

    `malloc` would keep some of it for each thread.
    """
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)
