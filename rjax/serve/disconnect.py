"""Cancel a request's work when its client disconnects."""

import asyncio
from collections.abc import Awaitable

from starlette.requests import Request
from starlette.types import Receive

from rjax.serve.errors import ApiError


async def cancel_on_disconnect[T](request: Request, work: Awaitable[T]) -> T:
    """Await ``work`` and cancel it if the client disconnects first.

    Raises:
        ApiError: 499, the client disconnected.
    """
    working = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(wait_for_disconnect(request.receive))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
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
