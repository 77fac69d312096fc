"""Runs an ASGI app on one request whose body is complete, without a connection."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from starlette.types import ASGIApp, Message

from rjax.replicas.replica_request import Messages


async def call_app(app: ASGIApp, scope: Mapping[str, Any], body: bytes) -> AsyncGenerator[Messages]:
    """Yield the messages of the response as they come, several at once if they are there.

    Closing the generator disconnects the client: the app receives ``http.disconnect`` and is
    awaited.

    Args:
        app: to run.
        scope: of the request.
        body: of the request.

    Raises:
        Exception: what the app raised, after its messages.
    """
    messages: asyncio.Queue[Message | None] = asyncio.Queue()
    gone = asyncio.Event()
    left = [body]

    async def receive() -> Message:
        if left:
            return {"type": "http.request", "body": left.pop(), "more_body": False}
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        if not gone.is_set():
            messages.put_nowait(message)

    async def run() -> None:
        try:
            await app(dict(scope), receive, send)
        finally:
            messages.put_nowait(None)

    running = asyncio.ensure_future(run())
    try:
        while True:
            found = [await messages.get()]
            while not messages.empty():
                found.append(messages.get_nowait())
            ready = [message for message in found if message is not None]
            if ready:
                yield ready
            if len(ready) < len(found):
                break
        await running
    finally:
        gone.set()
        if not running.done():
            # A cancelled caller may be cancelled again; the app must end its request nevertheless.
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.shield(asyncio.gather(running, return_exceptions=True))
