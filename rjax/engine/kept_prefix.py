"""A request whose prompt is kept as a named prefix once it is computed."""

import dataclasses

from rjax.engine.page_hash import PageHashes


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
