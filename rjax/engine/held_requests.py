"""Requests whose programs are being compiled, while others run."""

from collections.abc import Callable

from rjax.batch.sequence import Sequence
from rjax.engine.request import Request
from rjax.engine.scheduler import Scheduler


class HeldRequests:
    """Gives requests to the scheduler once their steps need not wait for the compiler.

    A step that waits for the compiler delays every sequence in it. So a request is held while
    others run; if nothing runs, its step waits.

    Args:
        scheduler: the scheduler that gets the requests.
        is_ready: whether the programs that a sequence needs besides the steps are compiled; those
            that are missing are compiled next.
    """

    def __init__(self, scheduler: Scheduler, is_ready: Callable[[Sequence], bool]) -> None:
        self._scheduler, self._is_ready = scheduler, is_ready
        self._held: dict[str, tuple[Request, str | None]] = {}

    @property
    def num_sequences(self) -> int:
        """Number of sequences that are held."""
        return sum(len(request.sequences) for request, _ in self._held.values())

    def add(self, request: Request, share: str | None) -> None:
        """Take a request of a share."""
        self._held[request.request_id] = request, share
        if self._may_run(request):
            self.release(request.request_id)

    def release_ready(self) -> None:
        """Give those that may run to the scheduler."""
        for request_id, (request, _) in list(self._held.items()):
            if self._may_run(request):
                self.release(request_id)

    def release(self, request_id: str) -> None:
        """Give a request to the scheduler, if it is held."""
        request, share = self._held.pop(request_id, (None, None))
        for sequence in request.sequences if request is not None else ():
            self._scheduler.add(sequence, share)

    def close(self) -> None:
        """Hold nothing from now on, and no reference to what ``is_ready`` belongs to."""
        self._is_ready = lambda _: True

    def _may_run(self, request: Request) -> bool:
        return not self._scheduler.running or self._is_ready(request.sequences[0])
