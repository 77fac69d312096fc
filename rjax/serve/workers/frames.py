"""Messages between the server and its worker processes: a small JSON object and bytes."""

import asyncio
import json
import socket
import struct
from typing import Any

SIZES = struct.Struct("!IQ")
"""A message begins with the bytes of its object, and of the data after it."""


def pack(head: dict[str, Any], data: bytes = b"") -> bytes:
    """A message as it is sent."""
    text = json.dumps(head).encode()
    return SIZES.pack(len(text), len(data)) + text + data


def receive(source: socket.socket) -> tuple[dict[str, Any], bytes] | None:
    """The next message of a blocking socket; None when the other side has closed it."""
    sizes = receive_exactly(source, SIZES.size)
    if sizes is None:
        return None
    head, data = (receive_exactly(source, size) for size in SIZES.unpack(sizes))
    return None if head is None or data is None else (json.loads(head), data)


async def read(source: asyncio.StreamReader) -> tuple[dict[str, Any], bytes]:
    """The next message.

    Raises:
        asyncio.IncompleteReadError: the other side has closed the connection.
        ConnectionError: likewise.
    """
    head, data = SIZES.unpack(await source.readexactly(SIZES.size))
    return json.loads(await source.readexactly(head)), await source.readexactly(data)


def receive_exactly(source: socket.socket, size: int) -> bytes | None:
    """So many bytes of a blocking socket; None when the other side closes it before."""
    found = bytearray(size)
    view, at = memoryview(found), 0
    while at < size:
        count = source.recv_into(view[at:])
        if count == 0:
            return None
        at += count
    return bytes(found)
