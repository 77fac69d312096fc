"""A burst of requests leaves the event loop to the streams between its parts."""

import asyncio
import collections


class LoopTurns:
    """Lets at most ``most`` callers of `enter` pass in one turn of the event loop, in their order.

    Between two turns the loop reads sockets, so that what the engine has generated reaches its
    streams while the requests of a burst are parsed.
    """

    def __init__(self, most: int) -> None:
        self._most = self._left = most
        self._waiting: collections.deque[asyncio.Future[None]] = collections.deque()

    async def enter(self) -> None:
        """Pass in this turn, or wait for a later one."""
        loop = asyncio.get_running_loop()
        if self._left == self._most:
            loop.call_soon(self._next_turn, loop)
        if self._left > 0 and not self._waiting:
            self._left -= 1
            return
        turn = loop.create_future()
        self._waiting.append(turn)
        await turn

    def _next_turn(self, loop: asyncio.AbstractEventLoop) -> None:
        self._left = self._most
        while self._waiting and self._left > 0:
            turn = self._waiting.popleft()
            if not turn.done():  # its request was cancelled
                self._left -= 1
                turn.set_result(None)
        if self._left < self._most:
            loop.call_soon(self._next_turn, loop)
