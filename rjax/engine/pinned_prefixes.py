"""Named beginnings whose pages are kept: any number at once, nested in one another or not."""

import dataclasses

from rjax.batch.page_hash import PageHashes, block_bytes
from rjax.engine.block_manager import BlockManager
from rjax.errors import InvalidRequestError, OutOfMemoryError


@dataclasses.dataclass(frozen=True, slots=True)
class NamedPrefix:
    """A beginning that is kept.

    Attributes:
        name: chosen by whoever added it.
        token_ids: its tokens.
        cache_salt: requests find it only under the same salt.
        pages: of the pool that hold its KV, pinned.
        text: what its tokens were made of, for whoever lays out prompts after it; or None.
    """

    name: str
    token_ids: tuple[int, ...]
    cache_salt: str | None
    pages: tuple[int, ...]
    text: str | None = None


class PinnedPrefixes:
    """Pins the pages of named prefixes; what several of them share is stored once.

    Args:
        blocks: the pool.
        reserve: pages that must remain for sequences, whatever is pinned.
    """

    def __init__(self, blocks: BlockManager, reserve: int) -> None:
        self._blocks = blocks
        self._reserve = reserve
        self._named: dict[str, NamedPrefix] = {}

    def pages(self) -> list[int]:
        """Pinned pages, once for each prefix that holds them."""
        return [page for prefix in self._named.values() for page in prefix.pages]

    def names(self) -> list[NamedPrefix]:
        """The prefixes, in the order of their adding."""
        return list(self._named.values())

    def get(self, name: str) -> NamedPrefix:
        """The prefix of this name.

        Raises:
            InvalidRequestError: there is none.
        """
        if name not in self._named:
            known = ", ".join(map(repr, self._named)) or "none"
            raise InvalidRequestError(f"no prefix is named {name!r}; there are: {known}")
        return self._named[name]

    def check_room(self, hashes: PageHashes, num_tokens: int, replaced: str) -> None:
        """Whether sequences keep enough room beside a new prefix in place of ``replaced``.

        Raises:
            OutOfMemoryError: they do not.
        """
        kept = [p for name, p in self._named.items() if name != replaced]
        pinned = {page for prefix in kept for page in prefix.pages}
        new = -(-num_tokens // self._blocks.page_size)
        new -= len(pinned.intersection(self._blocks.match(hashes.keys)))
        total = self._blocks.num_pages
        if total - len(pinned) - new < self._reserve:
            raise OutOfMemoryError(
                f"the KV pool has {total} pages of {self._blocks.page_size} tokens, of which "
                f"{len(pinned) + new} would be pinned; a sequence of full length needs "
                f"{self._reserve}: raise num_pages, lower max_model_len, or drop a prefix"
            )

    def offer(self, tokens: list[int], hashes: PageHashes, pages: list[int]) -> None:
        """Make pages that hold these tokens findable.

        Some may be unknown to the index: another page held the same when they were computed, and
        has been evicted since.
        """
        for n, key in enumerate(hashes.keys):
            self._blocks.register(pages[n], key, hashes.parent(n), hashes.blocks[n])
        rest = tokens[len(hashes.keys) * self._blocks.page_size :]
        if rest:
            n = len(hashes.keys)
            self._blocks.register_partial(pages[n], hashes.parent(n), block_bytes(rest))

    def find(self, tokens: list[int], hashes: PageHashes) -> list[int]:
        """Pages that hold these tokens, with no reference taken; to be called between steps."""
        self._blocks.begin_step()
        pages = self._blocks.match(hashes.keys)
        rest = tokens[len(pages) * self._blocks.page_size :]
        if rest and len(pages) == len(hashes.keys):
            found = self._blocks.match_partial_page(hashes.parent(len(pages)), block_bytes(rest))
            if found is not None and found[1] == len(rest):
                pages.append(found[0])
        return pages

    def pin(
        self,
        name: str,
        tokens: list[int],
        salt: str | None,
        pages: list[int],
        text: str | None = None,
    ) -> None:
        """Keep these pages under a name, in place of what it meant before."""
        self._blocks.acquire(pages)
        self.drop(name, missing_ok=True)
        self._named[name] = NamedPrefix(name, tuple(tokens), salt, tuple(pages), text)

    def place(
        self,
        name: str,
        tokens: list[int],
        hashes: PageHashes,
        salt: str | None,
        text: str | None = None,
    ) -> list[int]:
        """Pin a prefix whose KV comes from elsewhere.

        Returns:
            Its last pages, which the caller must fill before the next step; the pages before them
            were there.

        Raises:
            OutOfMemoryError: running sequences hold the pages.
        """
        known = self.find(tokens, hashes)
        self._blocks.acquire(known)
        S = self._blocks.page_size
        fresh = self._blocks.allocate(-(-len(tokens) // S) - len(known))
        if fresh is None:
            self._blocks.release(known)
            raise OutOfMemoryError("the running requests hold the pages; load the prefix later")
        pages = known + fresh
        self.offer(tokens, hashes, pages)
        self.pin(name, tokens, salt, pages, text)
        self._blocks.release(pages)
        return fresh

    def drop(self, name: str, *, missing_ok: bool = False) -> None:
        """Let go of a prefix: its pages may be evicted like any other's.

        Raises:
            InvalidRequestError: there is none of this name.
        """
        if missing_ok and name not in self._named:
            return
        prefix = self.get(name)
        del self._named[name]
        self._blocks.release(prefix.pages)
