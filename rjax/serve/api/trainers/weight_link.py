"""WeightLink: receives a trainer's weights on the same machine, through shared memory.

The trainer listens on a Unix socket, and the server connects to it. A message of the trainer is one
bucket: some of the tensors that the request announced, in its order, each at a multiple of
``ALIGNMENT`` bytes. The bytes are in an anonymous file of the kernel's (``memfd_create``) whose
descriptor comes with the message, so that nothing is copied through the socket, nothing is left
behind by a process that dies, and nothing is unpickled. The file must be sealed: its writer can
neither change nor shorten it any more. The server answers each bucket, with an error or none.
"""

import contextlib
import dataclasses
import fcntl
import math
import mmap
import os
import socket
import stat
import struct
import time
from collections.abc import Sequence
from pathlib import Path

import ml_dtypes
import numpy as np

from rjax.errors import InvalidRequestError

FOLDER = Path("/dev/shm")
ALIGNMENT = 128  # bytes
BUCKET = struct.Struct("<QQ")
"""Number of tensors and number of bytes of a bucket."""

MOST_ERROR_BYTES = 4096
DTYPES = {
    name: np.dtype(getattr(ml_dtypes, name, name))
    for name in (
        *("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"),
        *("int64", "int32", "int16", "int8", "uint8", "bool"),
    )
}
"""The dtypes of tensors by torch's names."""

_MOST_UNREAD = 64  # buckets; a trainer waits for the answer to each
_RETRY_SECONDS = 0.02
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_WRITE


@dataclasses.dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor that a trainer announces.

    Attributes:
        name: of the parameter, in the trainer's model.
        dtype: of its elements.
        shape: of the tensor.
    """

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]

    @classmethod
    def read(cls, name: str, dtype: str, shape: Sequence[int]) -> "TensorSpec":
        """A tensor by the words of a request.

        Raises:
            InvalidRequestError: the dtype is unknown or the shape is no shape.
        """
        found = DTYPES.get(dtype.removeprefix("torch."))
        if found is None:
            raise InvalidRequestError(
                f"the tensor {name[:200]!r} has the dtype {dtype[:40]!r}; give one of "
                f"{', '.join(DTYPES)}"
            )
        if any(size < 0 or size > 2**48 for size in shape) or len(shape) > 16:
            raise InvalidRequestError(f"the tensor {name[:200]!r} has no shape: {shape[:16]!r}")
        return cls(name, found, tuple(shape))

    @property
    def num_bytes(self) -> int:
        """Bytes of the values."""
        return math.prod(self.shape) * self.dtype.itemsize


def socket_path(port: int) -> Path:
    """The Unix socket of the trainer that would listen on this port of the machine."""
    return FOLDER / f"rjax-weights-{port}.sock"


def check_is_here(address: str) -> None:
    """Check that an address or a host's name is of this machine.

    Raises:
        InvalidRequestError: it is not.
    """
    try:
        kind, *_, place = socket.getaddrinfo(address, 0, type=socket.SOCK_DGRAM)[0]
        with socket.socket(kind, socket.SOCK_DGRAM) as probe:
            probe.bind(place)  # possible with own addresses only
    except OSError as error:
        raise InvalidRequestError(
            f"the trainer's address {address[:100]!r} is not of this machine; weights come from "
            "the same machine, as shared memory"
        ) from error


class WeightLink:
    """A connection to a trainer. The methods block; any thread may call them, one at a time.

    Args:
        connection: a Unix socket of packets.
        seconds: to wait for a bucket.
    """

    def __init__(self, connection: socket.socket, seconds: float = 300.0) -> None:
        self._socket = connection
        self._socket.settimeout(seconds)

    @classmethod
    def connect(cls, port: int, seconds: float) -> "WeightLink":
        """Connect to the trainer of this port, and wait until it listens.

        Raises:
            InvalidRequestError: no trainer of this user listens there in time.
        """
        path, end = socket_path(port), time.monotonic() + seconds
        while True:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                found = os.lstat(path)
                if not stat.S_ISSOCK(found.st_mode) or found.st_uid not in (os.geteuid(), 0):
                    raise InvalidRequestError(
                        f"{path} is no socket of the user that runs this server; run the trainer "
                        "as the same user"
                    )
                connection.connect(os.fspath(path))
                return cls(connection)
            except OSError:
                connection.close()
                if time.monotonic() > end:
                    raise InvalidRequestError(
                        f"no trainer listens at {path}: weights come from the same machine, from a "
                        "sender that shares them in memory; see the documentation's page on "
                        "trainers"
                    ) from None
            except BaseException:
                connection.close()
                raise
            time.sleep(_RETRY_SECONDS)

    def receive(self, expected: Sequence[TensorSpec]) -> list[tuple[str, np.ndarray]]:
        """The tensors of the next bucket, which map the trainer's memory.

        Args:
            expected: announced tensors that have not come.

        Raises:
            InvalidRequestError: the trainer has gone, or the bucket is not as announced.
        """
        try:
            data, descriptors, _, _ = socket.recv_fds(self._socket, BUCKET.size + 1, 4)
        except ConnectionError:
            data, descriptors = b"", []
        except OSError as error:
            raise InvalidRequestError(f"the trainer sends no weights: {error}") from error
        with contextlib.ExitStack() as opened:
            for descriptor in descriptors:
                opened.callback(os.close, descriptor)
            if not data:
                raise InvalidRequestError(
                    f"the trainer closed the connection before {len(expected)} of its tensors came"
                )
            if len(data) != BUCKET.size or len(descriptors) != 1:
                raise InvalidRequestError("the trainer's message is not a bucket of tensors")
            count, num_bytes = BUCKET.unpack(data)
            return _tensors(descriptors[0], count, num_bytes, expected)

    def answer(self, error: str = "") -> None:
        """Answer the last bucket; an empty error asks for the next one."""
        with contextlib.suppress(OSError):  # receive finds a trainer that has gone
            self._socket.send(error.encode()[:MOST_ERROR_BYTES] or b"\0")

    def close(self) -> None:
        """Close the connection; a call that waits ends."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RD)
            # With unread buckets the kernel would drop the last answer.
            self._socket.setblocking(False)
            for _ in range(_MOST_UNREAD):
                data, descriptors, _, _ = socket.recv_fds(self._socket, BUCKET.size, 4)
                for descriptor in descriptors:
                    os.close(descriptor)
                if not data:
                    break
        self._socket.close()


def _tensors(
    descriptor: int, count: int, num_bytes: int, expected: Sequence[TensorSpec]
) -> list[tuple[str, np.ndarray]]:
    """The tensors of a bucket's file."""
    if not 0 < count <= len(expected):
        raise InvalidRequestError(
            f"the trainer's bucket has {count} tensors; {len(expected)} announced ones are left"
        )
    starts, end = [], 0
    for spec in expected[:count]:
        starts.append(end)
        end += -(-spec.num_bytes // ALIGNMENT) * ALIGNMENT
    if num_bytes != end:
        raise InvalidRequestError(
            f"the trainer's bucket has {num_bytes} bytes; its {count} announced tensors, from "
            f"{expected[0].name!r} on, take {end}"
        )
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError:
        seals = 0  # a file on a disk has none
    if seals & _SEALS != _SEALS:
        raise InvalidRequestError(
            "the trainer could still change its bucket; seal the memfd against writing and "
            "shrinking before it is sent"
        )
    if os.fstat(descriptor).st_size < num_bytes:
        raise InvalidRequestError("the trainer's bucket is shorter than it says")
    shared = mmap.mmap(descriptor, num_bytes, prot=mmap.PROT_READ) if num_bytes else b""
    return [
        (
            spec.name,
            np.frombuffer(shared, spec.dtype, math.prod(spec.shape), start).reshape(spec.shape)
            if spec.num_bytes
            else np.zeros(spec.shape, spec.dtype),
        )
        for spec, start in zip(expected[:count], starts, strict=True)
    ]
