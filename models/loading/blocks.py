"""Blocks: the parts of a tensor that are read and copied to the devices at once."""

import abc
import collections
import contextlib
import dataclasses
import itertools
import math
import mmap
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rjax.models.loading.tensors import TensorEntry

_BLOCK_BYTES = 32 << 20
_READ_BYTES = 16 << 20  # between two looks at whether loading was stopped


@dataclasses.dataclass(frozen=True, slots=True)
class Block:
    """Some bytes of one tensor or of several, and the device array that they become.

    Attributes:
        ranges: (tensor, start, stop), byte ranges that follow each other in the array.
        dtype: dtype of the values in the file.
        shape: shape of the array.
        sharding: sharding of the array.
    """

    ranges: tuple[tuple[TensorEntry, int, int], ...]
    dtype: np.dtype
    shape: tuple[int, ...]
    sharding: NamedSharding

    @property
    def size(self) -> int:
        """Size in bytes."""
        return sum(stop - start for _, start, stop in self.ranges)

    @property
    def abstract(self) -> jax.ShapeDtypeStruct:
        """Shape, dtype and sharding of the array, which has no 64-bit type unless JAX has them."""
        dtype = jax.dtypes.canonicalize_dtype(self.dtype)
        return jax.ShapeDtypeStruct(self.shape, dtype, sharding=self.sharding)

    def read(self, memory: np.ndarray, check: Callable[[], None]) -> None:
        """Read the block into ``memory`` (bytes), calling ``check`` every few milliseconds.

        Raises CheckpointError if the file cannot be read or was truncated, and what ``check``
        raises.
        """
        done = 0
        for entry, start, stop in self.ranges:
            for first in range(start, stop, _READ_BYTES):
                check()
                size = min(_READ_BYTES, stop - first)
                entry.read_into(memory[done : done + size], first)
                done += size


def split_rows(
    entry: TensorEntry,
    dtype: np.dtype,
    first_row: int,
    shape: tuple[int, ...],
    sharding: NamedSharding,
    block_bytes: int | None,
) -> tuple[Block, ...]:
    """The blocks of the rows of a tensor from ``first_row`` on that have this shape together.

    There is one block, of that shape and sharding, if it has at most ``block_bytes`` or that is
    None. Otherwise the blocks have the shape (shards, rows, ...) and about equal size, and are to
    be joined along ``rows``: ``shards`` is the number of devices that the first axis is sharded
    over, and each block has the same number of rows of every shard, so that all devices receive
    data at the same time.
    """
    rows = shape[0]
    row_bytes = math.prod(shape[1:]) * dtype.itemsize
    if block_bytes is None or rows * row_bytes <= block_bytes:
        ranges = ((entry, first_row * row_bytes, (first_row + rows) * row_bytes),)
        return (Block(ranges, dtype, shape, sharding),)
    first_axis, *other_axes = (*sharding.spec, *(None,) * (len(shape) - len(sharding.spec)))
    shards = 1 if first_axis is None else sharding.mesh.shape[first_axis]
    stacked = NamedSharding(sharding.mesh, PartitionSpec(first_axis, None, *other_axes))
    per_shard = rows // shards
    firsts = [(entry, first_row + shard * per_shard) for shard in range(shards)]
    return _stacked_blocks(firsts, dtype, (per_shard, *shape[1:]), stacked, block_bytes)


def stack_tensors(
    entries: Sequence[TensorEntry],
    dtype: np.dtype,
    shape: tuple[int, ...],
    sharding: NamedSharding,
    block_bytes: int | None,
) -> tuple[Block, ...]:
    """The blocks (tensors, rows, ...) of tensors of one shape, to be joined along ``rows``.

    There is one block if it has at most ``block_bytes`` or that is None. The sharding is that of
    the blocks; over the first axis, each device gets whole tensors.
    """
    firsts = [(entry, 0) for entry in entries]
    return _stacked_blocks(firsts, dtype, shape, sharding, block_bytes)


def _stacked_blocks(
    firsts: Sequence[tuple[TensorEntry, int]],
    dtype: np.dtype,
    shape: tuple[int, ...],
    sharding: NamedSharding,
    block_bytes: int | None,
) -> tuple[Block, ...]:
    """Blocks with the same number of rows of every part, which starts at a row of a tensor."""
    rows, row_bytes = shape[0], math.prod(shape[1:]) * dtype.itemsize
    most = rows if block_bytes is None else max(1, block_bytes // (len(firsts) * row_bytes))
    count = -(-rows // most)
    bounds = [rows * i // count for i in range(count + 1)]
    blocks = []
    for start, stop in itertools.pairwise(bounds):
        ranges = tuple(
            (entry, (first + start) * row_bytes, (first + stop) * row_bytes)
            for entry, first in firsts
        )
        whole = len(firsts), stop - start, *shape[1:]
        blocks.append(Block(ranges, dtype, whole, sharding))
    return tuple(blocks)


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
