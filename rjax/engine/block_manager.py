"""Who owns which page of the KV pool, and whose content can be used again."""

import dataclasses
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from rjax.engine.page_index import PageContent, PageIndex
from rjax.errors import OutOfMemoryError


@dataclasses.dataclass(frozen=True, slots=True)
class PageCounts:
    """Pages by state; the three add up to ``total`` at every moment."""

    free: int
    used: int
    cached: int
    total: int


class BlockManager:
    """Reference counts and prefix tree of the pages of one pool.

    A page is *used* while at least one owner (a sequence, or a pin) holds it, *cached* when nobody
    holds it but its content can serve a later prompt, and *free* otherwise. A cached page is the
    first to be taken back when free ones run out, least recently used first; a sequence gives its
    pages back from the last to the first, so that a page goes before the pages it depends on.
    Every operation is O(1) a page.

    Full pages are found by their chain key. A page that holds the beginning of what is wanted is
    found by its tokens; only content of steps dispatched before the present one is offered so,
    because it is copied before the step runs.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self._free = list(range(num_pages - 1, -1, -1))
        self._references = [0] * num_pages
        self._key_of: list[bytes | None] = [None] * num_pages
        self._page_of: dict[bytes, int] = {}
        self._index = PageIndex(num_pages)
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._promised: dict[bytes, object] = {}
        self._young: set[int] = set()

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

    def begin_step(self) -> None:
        """A new step is planned: the ones before it are dispatched."""
        self._young.clear()

    def match(self, keys: Sequence[bytes]) -> list[int]:
        """Pages that hold the longest known beginning of this chain of keys; takes no reference."""
        pages = []
        for key in keys:
            page = self._page_of.get(key)
            if page is None:
                break
            pages.append(page)
        return pages

    def match_tail(self, parent: bytes, tokens: bytes) -> tuple[int, int] | None:
        """A page after the chain ``parent`` that begins with some of these tokens (int32 bytes),
        and how many; takes no reference. At least an eighth of a page, or it is None."""
        found = self._index.find(parent, tokens, self._young)
        return found if found and found[1] >= max(1, self.page_size // 8) else None

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
        """Let the only owner of a page write into it: its content serves nobody else from now on.

        False, and nothing done, where it has other owners.
        """
        if self._references[page] != 1:
            return False
        self._forget(page)
        return True

    def register(self, page: int, key: bytes, parent: bytes, block: bytes) -> None:
        """Say that a used page holds (or will hold, by work dispatched already) the chain ``key``.

        ``block`` is its tokens, which follow the chain ``parent``. If another page holds the same,
        that one stays the cached copy.
        """
        self._promised.pop(key, None)
        if key not in self._page_of and self._key_of[page] is None:
            self._page_of[key] = page
            self._key_of[page] = key
            self._index.put(page, PageContent(parent, block))
            self._young.add(page)

    def register_beginning(self, page: int, parent: bytes, tokens: bytes) -> None:
        """Say that a used page begins with these tokens, by work dispatched already."""
        known = self._index.content(page)
        if known is None or len(known.tokens) < len(tokens):
            self._index.put(page, PageContent(parent, tokens))
            self._young.add(page)

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
        self._index.remove(page)
        self._young.discard(page)
        key = self._key_of[page]
        if key is not None:
            del self._page_of[key]
            self._key_of[page] = None


def check_sequence_fits(num_pages: int, page_size: int, max_model_len: int) -> None:
    """Whether one sequence of full length fits into a pool.

    Raises:
        OutOfMemoryError: it does not.
    """
    needed = -(-max_model_len // page_size)
    if num_pages < needed:
        raise OutOfMemoryError(
            f"the KV pool has {num_pages} pages of {page_size} tokens; one sequence of "
            f"max_model_len = {max_model_len} needs {needed}: raise num_pages or lower "
            "max_model_len"
        )
