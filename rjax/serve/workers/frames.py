"""Message framing between the server and its workers: a JSON object and binary data."""

import asyncio
import json
import socket
import struct
from typing import Any

SIZES = struct.Struct("!IQ")
"""Header of a message: the sizes of its JSON object and of its data, in bytes."""


def pack(head: dict[str, Any], data: bytes = b"") -> bytes:
    """Serialise a message."""
    text = json.dumps(head).encode()
    return SIZES.pack(len(text), len(data)) + text + data


def receive(source: socket.socket) -> tuple[dict[str, Any], bytes] | None:
    """Read a message from a blocking socket; None if the peer has closed it."""
    sizes = receive_exactly(source, SIZES.size)
    if sizes is None:
        return None
    head, data = (receive_exactly(source, size) for size in SIZES.unpack(sizes))
    return None if head is None or data is None else (json.loads(head), data)


async def read(source: asyncio.StreamReader) -> tuple[dict[str, Any], bytes]:
    """Read a message from an asyncio stream.

    Raises:
        asyncio.IncompleteReadError, ConnectionError: the peer has closed the connection.
    """
    head, data = SIZES.unpack(await source.readexactly(SIZES.size))
    return json.loads(await source.readexactly(head)), await source.readexactly(data)


def receive_exactly(source: socket.socket, size: int) -> bytes | None:
    """Read ``size`` bytes from a blocking socket; None if the peer closes it before."""
    found = bytearray(size)
    view, at = memoryview(found), 0
    while at < size:
        count = source.recv_into(view[at:])
        if count == 0:
            return None
        at += count
    return bytes(found)
