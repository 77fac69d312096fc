"""Who owns which page of the KV pool, and which full pages can be used again."""

import dataclasses
from collections import OrderedDict
from collections.abc import Iterable, Sequence


@dataclasses.dataclass(frozen=True, slots=True)
class PageCounts:
    """Pages by state; the three add up to ``total`` at every moment."""

    free: int
    used: int
    cached: int
    total: int


class BlockManager:
    """Reference counts and prefix cache of the pages of one pool.

    A page is *used* while at least one owner (a sequence, or a pin) holds it, *cached* when nobody
    holds it but its content can serve a later prompt, and *free* otherwise. A cached page is the
    first to be taken back when free ones run out, least recently used first; a sequence gives its
    pages back from the last to the first, so that a page goes before the pages it depends on.
    Every operation is O(1) a page.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self._free = list(range(num_pages - 1, -1, -1))
        self._references = [0] * num_pages
        self._key_of: list[bytes | None] = [None] * num_pages
        self._page_of: dict[bytes, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._promised: dict[bytes, object] = {}

    @property
    def num_available(self) -> int:
        """Pages that an allocation can take: free ones and cached ones."""
        return len(self._free) + len(self._cached)

    def counts(self) -> PageCounts:
        """Exact accounting of the pool."""
        available = self.num_available
        return PageCounts(
            free=len(self._free),
            used=self.num_pages - available,
            cached=len(self._cached),
            total=self.num_pages,
        )

    def references(self, page: int) -> int:
        """Owners of a page."""
        return self._references[page]

    def match(self, keys: Sequence[bytes]) -> list[int]:
        """Pages that hold the longest known beginning of this chain of keys; takes no reference."""
        pages = []
        for key in keys:
            page = self._page_of.get(key)
            if page is None:
                break
            pages.append(page)
        return pages

    def acquire(self, pages: Iterable[int]) -> None:
        """Take one more reference on each of these pages, used or cached."""
        for page in pages:
            if self._references[page] == 0:
                del self._cached[page]
            self._references[page] += 1

    def allocate(self, count: int) -> list[int] | None:
        """Take ``count`` pages with unspecified content, one reference each; None if too few."""
        if count > self.num_available:
            return None
        pages = []
        for _ in range(count):
            if self._free:
                page = self._free.pop()
            else:
                page, _ = self._cached.popitem(last=False)
                self._forget(page)
            self._references[page] = 1
            pages.append(page)
        return pages

    def release(self, pages: Sequence[int]) -> None:
        """Give back one reference on each page of a sequence, given in the sequence's order."""
        for page in reversed(pages):
            assert self._references[page] > 0, page
            self._references[page] -= 1
            if self._references[page] == 0:
                if self._key_of[page] is None:
                    self._free.append(page)
                else:
                    self._cached[page] = None

    def register(self, page: int, key: bytes) -> None:
        """Say that a used page holds (or will hold, by work dispatched already) the chain ``key``.

        If another page holds it too, that one stays the cached copy.
        """
        self._promised.pop(key, None)
        if key not in self._page_of and self._key_of[page] is None:
            self._page_of[key] = page
            self._key_of[page] = key

    def promise(self, keys: Iterable[bytes], owner: object) -> None:
        """Say that ``owner`` is about to compute these pages, so that others can wait for them."""
        for key in keys:
            if key not in self._page_of:
                self._promised.setdefault(key, owner)

    def break_promises(self, keys: Iterable[bytes], owner: object) -> None:
        """Take back what is left of an owner's promises (it was preempted or aborted)."""
        for key in keys:
            if self._promised.get(key) is owner:
                del self._promised[key]

    def is_promised(self, key: bytes) -> bool:
        """Whether some running sequence is about to compute this page."""
        return key in self._promised

    def forget_cached(self) -> None:
        """Drop every cached page that nobody holds; its content serves no later prompt."""
        while self._cached:
            page, _ = self._cached.popitem()
            self._forget(page)
            self._free.append(page)

    def _forget(self, page: int) -> None:
        key = self._key_of[page]
        assert key is not None
        del self._page_of[key]
        self._key_of[page] = None
