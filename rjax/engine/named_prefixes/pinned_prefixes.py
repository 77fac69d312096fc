"""Prefixes whose KV pages are pinned: any number at once, nested in one another or not."""

from rjax.batch.page_hash import PageHashes, block_bytes
from rjax.engine.block_manager import BlockManager
from rjax.engine.named_prefixes.named_prefix import NamedPrefix, PendingPrefix
from rjax.errors import InvalidRequestError, OutOfMemoryError


class PinnedPrefixes:
    """Named prefixes, each with a reference on its pages; pages that several share exist once.

    Args:
        blocks: the pages of the pool.
        reserve: pages that must remain for sequences.
    """

    def __init__(self, blocks: BlockManager, reserve: int) -> None:
        self._blocks = blocks
        self._reserve = reserve
        self._named: dict[str, NamedPrefix] = {}

    def pages(self) -> list[int]:
        """Pinned pages, once for each prefix that holds them."""
        return [page for prefix in self._named.values() for page in prefix.pages]

    def all(self) -> list[NamedPrefix]:
        """The prefixes, in the order in which they were pinned."""
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

    def check_capacity(self, prefix: PendingPrefix) -> None:
        """Check that sequences keep enough pages when this prefix is pinned under its name.

        Raises:
            OutOfMemoryError: they do not.
        """
        others = [p for name, p in self._named.items() if name != prefix.name]
        pinned = {page for other in others for page in other.pages}
        new = -(-len(prefix.tokens) // self._blocks.page_size)
        new -= len(pinned.intersection(self._blocks.match(prefix.hashes.keys)))
        total = self._blocks.num_pages
        if total - len(pinned) - new < self._reserve:
            raise OutOfMemoryError(
                f"the KV pool has {total} pages of {self._blocks.page_size} tokens, of which "
                f"{len(pinned) + new} would be pinned; a sequence of full length needs "
                f"{self._reserve}: raise num_pages, lower max_model_len, or drop a prefix"
            )

    def pin_computed(self, prefix: PendingPrefix, pages: list[int]) -> None:
        """Pin a prefix that a sequence has computed into ``pages``.

        Raises:
            OutOfMemoryError: other prefixes were pinned meanwhile, and there is no room left.
        """
        self.check_capacity(prefix)
        self._register(prefix, pages)
        self._pin(prefix, self._find(prefix.tokens, prefix.hashes))

    def place(self, prefix: PendingPrefix) -> list[int]:
        """Pin a prefix whose KV comes from elsewhere.

        Returns:
            The last pages of the prefix, which the caller must fill before the next step; the
            pages before them were in the cache.

        Raises:
            OutOfMemoryError: running sequences hold the pages.
        """
        cached = self._find(prefix.tokens, prefix.hashes)
        self._blocks.acquire(cached)
        S = self._blocks.page_size
        new = self._blocks.allocate(-(-len(prefix.tokens) // S) - len(cached))
        if new is None:
            self._blocks.release(cached)
            raise OutOfMemoryError("the running requests hold the pages; load the prefix later")
        pages = cached + new
        self._register(prefix, pages)
        self._pin(prefix, pages)
        self._blocks.release(pages)
        return new

    def drop(self, name: str, *, missing_ok: bool = False) -> None:
        """Unpin a prefix; its pages may be evicted like any other.

        Raises:
            InvalidRequestError: there is none of this name.
        """
        if missing_ok and name not in self._named:
            return
        prefix = self.get(name)
        del self._named[name]
        self._blocks.release(prefix.pages)

    def _register(self, prefix: PendingPrefix, pages: list[int]) -> None:
        """Enter pages that hold a prefix into the prefix cache.

        Some may be missing there: another page held the same tokens when they were computed, and
        has been evicted since.
        """
        hashes = prefix.hashes
        count = len(hashes.keys)
        for n, key in enumerate(hashes.keys):
            self._blocks.register(pages[n], key, hashes.parent(n), hashes.blocks[n], first=n == 0)
        rest = prefix.tokens[count * self._blocks.page_size :]
        if rest:
            self._blocks.register_partial(pages[count], hashes.parent(count), block_bytes(rest))

    def _find(self, tokens: list[int], hashes: PageHashes) -> list[int]:
        """Cached pages of these tokens, with no reference taken; call it between two steps."""
        self._blocks.begin_step()
        pages = self._blocks.match(hashes.keys)
        rest = tokens[len(pages) * self._blocks.page_size :]
        if rest and len(pages) == len(hashes.keys):
            found = self._blocks.match_partial_page(hashes.parent(len(pages)), block_bytes(rest))
            if found is not None and found[1] == len(rest):
                pages.append(found[0])
        return pages

    def _pin(self, prefix: PendingPrefix, pages: list[int]) -> None:
        """Keep these pages under the prefix's name, in place of those it had before."""
        self._blocks.acquire(pages)
        self.drop(prefix.name, missing_ok=True)
        self._named[prefix.name] = NamedPrefix(
            prefix.name, tuple(prefix.tokens), prefix.salt, tuple(pages), prefix.text
        )
