"""Arrays that one process hands to another in shared memory: a header, then their bytes.

The memory has no name in a file system. The other process opens it by the descriptor of the first,
so nothing is left behind if either of them ends, and the size of /dev/shm is no limit.
"""

import mmap
import os
import pathlib
import struct
from collections.abc import Iterable

import jax.numpy as jnp
import msgspec
import numpy as np

_ALIGNMENT = 64
_MAPPED_BYTES = 64 << 20
_LENGTH = struct.Struct("<Q")
_PATH = "/proc/{pid}/fd/{fd}"


class _Entry(msgspec.Struct, array_like=True):
    """An array: the offset is from the end of the header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int


class WeightFile:
    """Shared memory with these arrays, until it is closed.

    Args:
        items: (name, array) pairs.

    Attributes:
        path: where processes of the same user can open it.

    Raises:
        OSError: there is too little memory.
    """

    def __init__(self, items: Iterable[tuple[str, np.ndarray]]) -> None:
        arrays = [(name, np.asarray(array)) for name, array in items]
        entries, size = [], 0
        for name, array in arrays:
            entries.append(_Entry(name, array.dtype.name, array.shape, size))
            size += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        header = msgspec.msgpack.encode(entries)
        start = _start(len(header))
        self._fd = os.memfd_create("rjax-weights")
        self.path = _PATH.format(pid=os.getpid(), fd=self._fd)
        try:
            os.posix_fallocate(self._fd, 0, start + size)  # too little memory is an error here
            memory = mmap.mmap(self._fd, start + size)
            memory[: _LENGTH.size] = _LENGTH.pack(len(header))
            memory[_LENGTH.size : _LENGTH.size + len(header)] = header
            target = np.frombuffer(memory, np.uint8)
            for entry, (_, array) in zip(entries, arrays, strict=True):
                first = start + entry.offset
                place = target[first : first + array.nbytes].view(array.dtype)
                np.copyto(place.reshape(array.shape), array)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Remove the path; who has read it keeps the arrays."""
        os.close(self._fd)


def read_weight_file(path: str) -> list[tuple[str, np.ndarray]]:
    """The arrays of a `WeightFile`, whose memory is freed with the last of them.

    A large file is mapped. A small one is copied, since each mapping holds a file descriptor.

    Raises:
        OSError: the path cannot be read.
    """
    with pathlib.Path(path).open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        if size < _MAPPED_BYTES:
            data = np.frombuffer(file.read(), np.uint8)
        else:
            memory = mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ)
            data = np.frombuffer(memory, np.uint8)
    (length,) = _LENGTH.unpack_from(data)
    header = data[_LENGTH.size : _LENGTH.size + length].tobytes()
    entries = msgspec.msgpack.decode(header, type=list[_Entry])
    start = _start(length)
    found = []
    for entry in entries:
        dtype = jnp.dtype(entry.dtype)
        size = int(np.prod(entry.shape, dtype=np.int64)) * dtype.itemsize
        first = start + entry.offset
        found.append((entry.name, data[first : first + size].view(dtype).reshape(entry.shape)))
    return found


def _start(length: int) -> int:
    """Where the arrays begin, behind a header of this length."""
    return -(-(_LENGTH.size + length) // _ALIGNMENT) * _ALIGNMENT
