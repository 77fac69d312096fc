"""Reference counts of the pages of the KV pool, and the index of cached pages."""

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from rjax.batch.page_groups import pages_held
from rjax.batch.page_hash import is_chain_key
from rjax.engine.kv_events.event_log import EventLog
from rjax.engine.pages.index import PageContent, PageIndex
from rjax.errors import OutOfMemoryError


@dataclasses.dataclass(frozen=True, slots=True)
class PageCounts:
    """Pages by state; free + used + cached = total at all times."""

    free: int
    used: int
    cached: int
    total: int


class BlockManager:
    """Allocates the pages of one pool, and finds cached pages again.

    A page is *used* while it has an owner (a sequence or a pinned prefix), *cached* when it has no
    owner but its content can serve a later prompt, and *free* otherwise. Cached pages are evicted
    when free pages run out, least recently used first. A sequence releases its pages from the last
    to the first, so a page is evicted before the pages that its key depends on. Every operation is
    O(1) a page.

    Full pages are found by their chain key, partial matches by their tokens. A partial match is
    copied before the step runs, so only content of steps dispatched earlier is matched partially.

    Args:
        num_pages: number of pages in the pool.
        page_size: tokens a page.
        events: where to note full pages that enter and leave the cache; None notes nothing.

    Attributes:
        on_forget: called with the key of each full page that leaves the cache; None calls nothing.
    """

    def __init__(self, num_pages: int, page_size: int, events: EventLog | None = None) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self._free = list(range(num_pages - 1, -1, -1))
        self._references = [0] * num_pages
        self._key_of: list[bytes | None] = [None] * num_pages
        self._page_of: dict[bytes, int] = {}
        self._index = PageIndex(num_pages)
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._pending: dict[bytes, object] = {}
        self._new: set[int] = set()
        self._events = events
        self.on_forget: Callable[[bytes], None] | None = None

    @property
    def num_available(self) -> int:
        """Pages that can be allocated: free and cached ones."""
        return len(self._free) + len(self._cached)

    def counts(self) -> PageCounts:
        """Pages by state."""
        available = self.num_available
        return PageCounts(
            free=len(self._free),
            used=self.num_pages - available,
            cached=len(self._cached),
            total=self.num_pages,
        )

    def references(self, page: int) -> int:
        """Number of owners of a page."""
        return self._references[page]

    def begin_step(self) -> None:
        """Start to plan a step; all steps before it are dispatched."""
        self._new.clear()

    def match(self, keys: Sequence[bytes]) -> list[int]:
        """Pages of the longest cached prefix of this chain of keys; takes no reference."""
        pages = []
        for key in keys:
            page = self._page_of.get(key)
            if page is None:
                break
            pages.append(page)
        return pages

    def find(self, key: bytes) -> int | None:
        """The cached page of this chain key; takes no reference."""
        return self._page_of.get(key)

    def match_partial_page(self, parent: bytes, tokens: bytes) -> tuple[int, int] | None:
        """The page after the chain ``parent`` that shares most leading tokens with these.

        Args:
            parent: chain key of the pages before.
            tokens: the tokens to match, as int32 bytes.

        Returns:
            (page, shared tokens), with no reference taken; None if less than an eighth of a page
            is shared.
        """
        found = self._index.find(parent, tokens, self._new)
        return found if found and found[1] >= max(1, self.page_size // 8) else None

    def find_partial(self, parent: bytes, tokens: bytes) -> int | None:
        """The page after the chain ``parent`` whose leading tokens are these, given as int32 bytes.

        It finds them however few they are, and takes no reference.
        """
        found = self._index.find(parent, tokens, self._new)
        return found[0] if found and found[1] == len(tokens) // 4 else None

    def is_new(self, page: int) -> bool:
        """Whether the present step computes the content of a cached page."""
        return page in self._new

    def acquire(self, pages: Iterable[int]) -> None:
        """Take one more reference on each of these pages, used or cached."""
        for page in pages:
            if self._references[page] == 0:
                del self._cached[page]
            self._references[page] += 1

    def allocate(self, count: int) -> list[int] | None:
        """Take ``count`` pages of unspecified content, one reference each; None if too few."""
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
        """Release one reference on each page of a sequence, given in the sequence's order."""
        references = self._references
        for page in reversed(pages):
            assert references[page] > 0, page
            references[page] -= 1
            if references[page] == 0:
                if self._index.content(page) is None:
                    self._free.append(page)
                else:
                    self._cached[page] = None

    def take_over(self, page: int) -> bool:
        """Remove a page from the cache, so that its only owner can write to it.

        Returns:
            False, with nothing done, if the page has other owners.
        """
        if self._references[page] != 1:
            return False
        self._forget(page)
        return True

    def register(
        self, page: int, key: bytes, parent: bytes, block: bytes, *, first: bool = False
    ) -> None:
        """Cache a used page whose content is computed, by dispatched steps or the present one.

        If another page has the same key, that page stays the cached copy.

        Args:
            page: the page to cache.
            key: chain key of its tokens.
            parent: chain key of the page before it.
            block: its tokens as int32 bytes.
            first: whether it is the first page of its chain; then ``parent`` is a root key.
        """
        self._pending.pop(key, None)
        if key not in self._page_of and self._key_of[page] is None:
            self._page_of[key] = page
            self._key_of[page] = key
            self._index.put(page, PageContent(parent, block))
            self._new.add(page)
            if self._events is not None and is_chain_key(key):
                self._events.stored(key, parent, block, first=first)

    def register_partial(self, page: int, parent: bytes, tokens: bytes) -> None:
        """Cache a used page for partial matches by its leading tokens, as int32 bytes."""
        known = self._index.content(page)
        if known is None or len(known.tokens) < len(tokens):
            self._index.put(page, PageContent(parent, tokens))
            self._new.add(page)

    def mark_pending(self, keys: Iterable[bytes], owner: object) -> None:
        """Note that ``owner`` will compute these pages, so that other sequences wait for them."""
        for key in keys:
            if key not in self._page_of:
                self._pending.setdefault(key, owner)

    def clear_pending(self, keys: Iterable[bytes], owner: object) -> None:
        """Remove the pages that ``owner`` did not compute: it left the running set."""
        for key in keys:
            if self._pending.get(key) is owner:
                del self._pending[key]

    def is_pending(self, key: bytes) -> bool:
        """Whether a running sequence will compute this page."""
        return key in self._pending

    def forget_cached(self) -> None:
        """Free every cached page that has no owner."""
        while self._cached:
            page, _ = self._cached.popitem()
            self._forget(page)
            self._free.append(page)
        if self._events is not None:
            self._events.flush() if self._page_of else self._events.cleared()

    def forget_all(self) -> None:
        """Forget the content of every page, of those in use too, and free those without owner."""
        self._free += self._cached
        self._cached.clear()
        self._pending.clear()
        for page in range(self.num_pages):
            self._forget(page)
        if self._events is not None:
            self._events.cleared()

    def _forget(self, page: int) -> None:
        self._index.remove(page)
        self._new.discard(page)
        key = self._key_of[page]
        if key is not None:
            del self._page_of[key]
            self._key_of[page] = None
            if self.on_forget is not None:
                self.on_forget(key)
            if self._events is not None and is_chain_key(key):
                self._events.removed(key)


def check_sequence_fits(
    num_pages: int,
    page_size: int,
    max_model_len: int,
    windows: tuple[int | None, ...] = (None,),
) -> None:
    """Check that one sequence of full length fits into a pool of these page groups.

    Raises:
        OutOfMemoryError: it does not fit.
    """
    needed = pages_held(windows, max_model_len, page_size)
    if num_pages < needed:
        raise OutOfMemoryError(
            f"the KV pool has {num_pages} pages of {page_size} tokens; one sequence of "
            f"max_model_len = {max_model_len} needs {needed}: raise num_pages or lower "
            "max_model_len"
        )
