"""Prefixes that running requests compute."""

from rjax.batch.sequence import Sequence
from rjax.engine.named_prefixes.named_prefix import PendingPrefix
from rjax.engine.named_prefixes.pinned_prefixes import PinnedPrefixes
from rjax.engine.request import Request
from rjax.errors import OutOfMemoryError


class PendingPrefixes:
    """The prefix of each live request that computes one.

    Args:
        pinned: takes a prefix when its request has computed it.
    """

    def __init__(self, pinned: PinnedPrefixes) -> None:
        self._pinned = pinned
        self._pending: dict[str, PendingPrefix] = {}

    def __len__(self) -> int:
        return len(self._pending)

    def add(self, request_id: str, prefix: PendingPrefix) -> None:
        """Record that a queued request computes this prefix."""
        self._pending[request_id] = prefix

    def discard(self, request_id: str) -> None:
        """Forget the prefix of a request that ends without it, if the request has one."""
        self._pending.pop(request_id, None)

    def pin_computed(self, request: Request, sequence: Sequence) -> None:
        """Pin the prompt of a sequence that is about to finish, if the request asked for it.

        Where there is no room left, the request gets the OutOfMemoryError.
        """
        if sequence.index or request.request_id not in self._pending:
            return
        prefix = self._pending.pop(request.request_id)
        try:
            self._pinned.pin_computed(prefix, sequence)
        except OutOfMemoryError as error:
            request.error = error
