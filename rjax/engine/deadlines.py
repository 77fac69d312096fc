"""The deadlines of requests."""

import heapq
import time
from collections.abc import Iterator, Mapping

from rjax.engine.request import Request


class Deadlines:
    """A heap of the times at which requests are aborted.

    Finished requests stay in the heap until it holds twice as many entries as live requests. This
    bounds its size, and an addition costs O(log n) on average.

    Args:
        requests: live requests by id; only read.
    """

    def __init__(self, requests: Mapping[str, Request]) -> None:
        self._requests = requests
        self._heap: list[tuple[float, str]] = []

    def __len__(self) -> int:
        return len(self._heap)

    @property
    def is_late(self) -> bool:
        """Whether `late` may yield an id now."""
        return bool(self._heap) and self._heap[0][0] <= time.monotonic()

    def add(self, request: Request) -> None:
        """Add a live request; one without a deadline is ignored."""
        if request.deadline is None:
            return
        heapq.heappush(self._heap, (request.deadline, request.request_id))
        if len(self._heap) > 2 * len(self._requests) + 64:
            live = self._requests.values()
            self._heap = sorted((r.deadline, r.request_id) for r in live if r.deadline is not None)

    def late(self) -> Iterator[str]:
        """Ids of live requests past their deadline, each once."""
        now = time.monotonic()
        while self._heap and self._heap[0][0] <= now:
            deadline, request_id = heapq.heappop(self._heap)
            request = self._requests.get(request_id)
            if request is not None and request.deadline == deadline:
                yield request_id
