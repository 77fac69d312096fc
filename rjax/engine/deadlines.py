"""When which request's time is up."""

import heapq
import time
from collections.abc import Iterator, Mapping

from rjax.engine.request import Request


class Deadlines:
    """A heap of the moments at which requests are to be aborted.

    Most requests end in time, and stay in the heap until it holds twice as many as live; so its
    size has a bound, and an addition costs O(log) on average.

    Args:
        requests: the live ones by id; looked at, never changed.
    """

    def __init__(self, requests: Mapping[str, Request]) -> None:
        self._requests = requests
        self._heap: list[tuple[float, str]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, request: Request) -> None:
        """Watch a live request; nothing happens where it has no deadline."""
        if request.deadline is None:
            return
        heapq.heappush(self._heap, (request.deadline, request.request_id))
        if len(self._heap) > 2 * len(self._requests) + 64:
            live = self._requests.values()
            self._heap = sorted((r.deadline, r.request_id) for r in live if r.deadline is not None)

    def late(self) -> Iterator[str]:
        """Ids of the live requests whose time is up, each once."""
        now = time.monotonic()
        while self._heap and self._heap[0][0] <= now:
            deadline, request_id = heapq.heappop(self._heap)
            request = self._requests.get(request_id)
            if request is not None and request.deadline == deadline:
                yield request_id
