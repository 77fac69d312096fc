"""The trainer's end of a `WeightLink`, for numpy arrays."""

import contextlib
import fcntl
import os
import socket
from collections.abc import Sequence

import numpy as np

from rjax.serve.api.trainers.weight_link import ALIGNMENT, BUCKET, socket_path

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


class WeightSender:
    """Listens at a port's socket, as a context.

    Args:
        port: names the socket.
    """

    def __init__(self, port: int) -> None:
        self._path = socket_path(port)
        self._path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(os.fspath(self._path))
        self._listener.listen(1)
        self._listener.settimeout(30)
        self.connection: socket.socket | None = None

    def __enter__(self) -> "WeightSender":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def accept(self) -> None:
        """Wait for the server."""
        self.connection, _ = self._listener.accept()
        self.connection.settimeout(30)

    def send(self, arrays: Sequence[np.ndarray]) -> None:
        """Send one bucket, without waiting for its answer."""
        data = b"".join(_padded(array) for array in arrays)
        self.send_raw(BUCKET.pack(len(arrays), len(data)), data)

    def send_raw(self, message: bytes, data: bytes, seals: int = SEALS) -> None:
        """Send a message with a file of this content."""
        assert self.connection is not None
        descriptor = os.memfd_create("weights", os.MFD_ALLOW_SEALING)
        os.write(descriptor, data)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
        with contextlib.suppress(BrokenPipeError):  # the server has said why
            socket.send_fds(self.connection, [message], [descriptor])
        os.close(descriptor)

    def answer(self) -> str:
        """The server's error; empty without one."""
        assert self.connection is not None
        found = self.connection.recv(4096)
        assert found, "the server has closed the connection"
        return "" if found == b"\0" else found.decode()

    def close(self) -> None:
        """Vanish."""
        for each in (self.connection, self._listener):
            if each is not None:
                each.close()
        self._path.unlink(missing_ok=True)


def _padded(array: np.ndarray) -> bytes:
    data = array.tobytes()
    return data + bytes(-len(data) % ALIGNMENT)
