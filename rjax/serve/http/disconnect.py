"""End a request's work when its client disconnects.

ASGI reports a disconnect as a message, which a task has to wait for. With thousands of streams it
comes after several turns of a busy event loop, while the engine goes on for clients that have left.
`rjax.serve.http.http_protocol` therefore calls what a request registers with `on_disconnect` as
soon as the connection is lost. Other ASGI servers send the message only.
"""

import asyncio
from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.types import Receive, Scope

from rjax.serve.protocol.errors import ApiError

_EXTENSION = "rjax.disconnect"


class Disconnect:
    """Callbacks that run when the client of one request disconnects.

    Attributes:
        probe: writes bytes into the started response that clients skip, to find out whether this
            one has disconnected; see `rjax.serve.http.half_close`.
    """

    def __init__(self) -> None:
        self.probe: Callable[[], object] = lambda: None
        self._callbacks: list[Callable[[], object]] = []
        self._lost = False

    def offer(self, scope: Scope) -> None:
        """Let the request of this scope register callbacks."""
        scope.setdefault("extensions", {})[_EXTENSION] = self

    def add(self, callback: Callable[[], object]) -> None:
        """Register a callback, or call it now if the client has disconnected already."""
        if self._lost:
            callback()
        else:
            self._callbacks.append(callback)

    def lost(self) -> None:
        """Call the registered callbacks."""
        self._lost = True
        for callback in self._callbacks:
            callback()
        self._callbacks.clear()


def on_disconnect(scope: Scope, callback: Callable[[], object]) -> None:
    """Call ``callback`` when the client disconnects, if the HTTP server can; the message
    ``http.disconnect`` follows in any case."""
    found = scope.get("extensions", {}).get(_EXTENSION)
    if found is not None:
        found.add(callback)


def set_probe(scope: Scope, probe: Callable[[], object]) -> None:
    """Set `Disconnect.probe` of this request, if the HTTP server has it."""
    found = scope.get("extensions", {}).get(_EXTENSION)
    if found is not None:
        found.probe = probe


async def cancel_on_disconnect[T](request: Request, work: Awaitable[T]) -> T:
    """Await ``work`` and cancel it if the client disconnects first.

    Raises:
        ApiError: 499, the client disconnected.
    """
    working = asyncio.ensure_future(work)
    on_disconnect(request.scope, working.cancel)
    gone = asyncio.ensure_future(wait_for_disconnect(request.receive))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if working.done() and not working.cancelled():
            return working.result()
        raise ApiError(499, "the client went away")
    finally:
        for task in (working, gone):
            task.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


async def wait_for_disconnect(receive: Receive) -> None:
    """Return when the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass
