"""Sends tensors to `rjax serve` on the same machine, through anonymous shared memory.

The receiving side is `rjax.serve.api.trainers.weight_link`, which has the protocol.
"""

import contextlib
import fcntl
import mmap
import os
import socket
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

ALIGNMENT = 128  # bytes
BUCKET_BYTES = 256 * 2**20
SECONDS = 300.0  # to wait for the server
_BUCKET = struct.Struct("<QQ")
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


class Sender:
    """The trainer's end of a connection to the server.

    Args:
        port: names the socket; the server is told of it.
    """

    def __init__(self, port: int) -> None:
        path = Path(f"/dev/shm/rjax-weights-{port}.sock")
        path.unlink(missing_ok=True)  # of a trainer that was killed
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            before = os.umask(0o177)  # only this user connects
            try:
                listener.bind(os.fspath(path))
            finally:
                os.umask(before)
            try:
                listener.listen(1)
                listener.settimeout(SECONDS)
                self._connection, _ = listener.accept()
            finally:
                path.unlink(missing_ok=True)
        self._connection.settimeout(SECONDS)
        self.group = self  # TRL clears the store and the socket of vLLM's group

    @property
    def store(self) -> None:
        """Nothing; setting it closes the connection."""

    @store.setter
    def store(self, value: None) -> None:
        self._connection.close()

    def send(self, tensors: Iterable[torch.Tensor]) -> None:
        """Send tensors in the order in which they were announced.

        Raises:
            RuntimeError: the server refuses them.
        """
        for bucket in _buckets(tensors):
            self._send_bucket(bucket)

    def _send_bucket(self, tensors: list[torch.Tensor]) -> None:
        starts, end = [], 0
        for tensor in tensors:
            starts.append(end)
            end += _padded(tensor)
        descriptor = os.memfd_create("weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            if end:
                os.posix_fallocate(descriptor, 0, end)  # too little memory is an error here
                with mmap.mmap(descriptor, end) as shared:
                    for tensor, start in zip(tensors, starts, strict=True):
                        _copy(tensor, shared, start)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
            with contextlib.suppress(BrokenPipeError):  # the server has said why
                socket.send_fds(self._connection, [_BUCKET.pack(len(tensors), end)], [descriptor])
        finally:
            os.close(descriptor)
        answer = self._connection.recv(4096)
        if answer != b"\0":
            raise RuntimeError(answer.decode() or "the server has closed the connection")


def _copy(tensor: torch.Tensor, shared: mmap.mmap, start: int) -> None:
    if not tensor.numel():
        return
    target = torch.frombuffer(shared, dtype=tensor.dtype, count=tensor.numel(), offset=start)
    target.view(tensor.shape).copy_(tensor.detach())


def _padded(tensor: torch.Tensor) -> int:
    return -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT


def _buckets(tensors: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    bucket: list[torch.Tensor] = []
    size = 0
    for tensor in tensors:
        if bucket and size + _padded(tensor) > BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += _padded(tensor)
    if bucket:
        yield bucket
