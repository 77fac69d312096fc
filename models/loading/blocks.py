"""Blocks: the parts of a checkpoint tensor that are read and copied to the devices at once."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from rjax.models.loading.safetensors_header import TensorEntry

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
