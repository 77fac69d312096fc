"""The header ``X-Request-Id`` of responses, as vLLM's ``--enable-request-id-headers`` sets it."""

import uuid

from starlette.types import Message, Scope, Send

_NAME = b"x-request-id"
_MOST = 128  # bytes of an id that is repeated


def with_request_id(scope: Scope, send: Send) -> Send:
    """An ASGI ``send`` that adds the id of the request: the one that the client sent if it is
    short printable ASCII, otherwise a new one of 32 hexadecimal digits."""
    given = next((value for name, value in scope["headers"] if name == _NAME), b"")
    kept = 0 < len(given) <= _MOST and given.isascii() and given.decode("latin-1").isprintable()
    request_id = given if kept else uuid.uuid4().hex.encode()

    async def tagged(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", ()), (_NAME, request_id)]
        await send(message)

    return tagged
