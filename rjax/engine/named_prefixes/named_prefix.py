"""What a named prefix is: asked for, computed by a request, pinned."""

import dataclasses

from rjax.batch.page_hash import PageHashes


@dataclasses.dataclass(frozen=True, slots=True)
class NamedPrefix:
    """A named prefix whose KV is pinned in the pool.

    Attributes:
        name: chosen by the caller that added it.
        token_ids: the tokens of the prefix.
        cache_salt: only requests with the same salt are served from it; None for those without.
        pages: pages of the pool that hold its KV, in order; with windows, those of one page group
            after another.
        text: the text that the tokens were made from, or None.
    """

    name: str
    token_ids: tuple[int, ...]
    cache_salt: str | None
    pages: tuple[int, ...]
    text: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class KeepAs:
    """Asks the engine to pin the prompt of a request as a named prefix when the request finishes.

    Attributes:
        name: name of the prefix; a name in use gets the new tokens.
        text: the text that the tokens were made from, stored with them.
    """

    name: str
    text: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class PendingPrefix:
    """A prefix that is checked and not pinned yet.

    Attributes:
        name, text: see `KeepAs`.
        tokens: the tokens of the prefix.
        hashes: hash chain of its full pages.
        salt: cache salt of its requests.
    """

    name: str
    text: str | None
    tokens: list[int]
    hashes: PageHashes
    salt: str | None
