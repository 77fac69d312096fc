"""Requests whose prompts are kept as named prefixes once they are computed."""

import dataclasses

from rjax.batch.page_hash import PageHashes
from rjax.batch.sequence import Sequence
from rjax.engine.pinned_prefixes import PinnedPrefixes
from rjax.engine.request import Request
from rjax.errors import OutOfMemoryError


@dataclasses.dataclass(frozen=True, slots=True)
class KeepAs:
    """Asks the engine to keep a request's prompt as a named prefix when the request has finished.

    Attributes:
        name: of the prefix; a name in use gets the new tokens.
        text: what the tokens were made of; kept with them, and not looked at.
    """

    name: str
    text: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class PendingPrefix:
    """A prefix whose tokens are being computed.

    Attributes:
        name, text: as in `KeepAs`.
        tokens: of the prefix.
        hashes: chain keys of its full pages.
        salt: cache salt of the request.
    """

    name: str
    text: str | None
    tokens: list[int]
    hashes: PageHashes
    salt: str | None


class PendingPrefixes:
    """The prefixes that live requests compute.

    Args:
        pinned: keeps them then.
    """

    def __init__(self, pinned: PinnedPrefixes) -> None:
        self._pinned = pinned
        self._pending: dict[str, PendingPrefix] = {}

    def __len__(self) -> int:
        return len(self._pending)

    def add(self, request_id: str, prefix: PendingPrefix | None) -> None:
        """A request that computes a prefix, or none, is queued."""
        if prefix is not None:
            self._pending[request_id] = prefix

    def forget(self, request_id: str) -> None:
        """A request ends without computing its prefix, if it had one."""
        self._pending.pop(request_id, None)

    def keep(self, request: Request, sequence: Sequence) -> None:
        """Pin the prompt of a sequence that is about to finish, if that was asked for."""
        if sequence.index or request.request_id not in self._pending:
            return
        prefix = self._pending.pop(request.request_id)
        try:
            # Other prefixes may have been pinned while this one was computed.
            self._pinned.check_room(prefix.hashes, len(prefix.tokens), prefix.name)
        except OutOfMemoryError as error:
            request.error = error
            return
        self._pinned.offer(prefix.tokens, prefix.hashes, sequence.pages)
        pages = self._pinned.find(prefix.tokens, prefix.hashes)
        self._pinned.pin(prefix.name, prefix.tokens, prefix.salt, pages, prefix.text)
