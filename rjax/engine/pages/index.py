"""Finds pages by their tokens, at a finer granularity than whole pages."""

import dataclasses

import numpy as np

_CANDIDATES = 8  # pages compared in one look-up


@dataclasses.dataclass(frozen=True, slots=True)
class PageContent:
    """The content of a page, as dispatched steps compute it.

    Attributes:
        parent: chain key of the pages before it.
        tokens: its tokens, as the bytes of an int32 array: all of the page, or the leading ones.
    """

    parent: bytes
    tokens: bytes

    @property
    def num_tokens(self) -> int:
        """Tokens in the page."""
        return len(self.tokens) // 4

    def common(self, tokens: bytes) -> int:
        """Leading tokens that equal these."""
        size = min(len(tokens), len(self.tokens))
        if self.tokens[:size] == tokens[:size]:
            return size // 4
        mine, theirs = (np.frombuffer(t, np.int32, size // 4) for t in (self.tokens, tokens))
        return int((mine != theirs).argmax())


class PageIndex:
    """Pages by the chain key before them and by their first token.

    Many pages can follow one prefix. A look-up compares the eight added last, which bounds its
    cost.
    """

    def __init__(self, num_pages: int) -> None:
        self._content: list[PageContent | None] = [None] * num_pages
        self._pages: dict[tuple[bytes, bytes], dict[int, None]] = {}

    def content(self, page: int) -> PageContent | None:
        """The content of a page; None if it is not indexed."""
        return self._content[page]

    def put(self, page: int, content: PageContent) -> None:
        """Set the content of a page."""
        self.remove(page)
        self._content[page] = content
        self._pages.setdefault((content.parent, content.tokens[:4]), {})[page] = None

    def remove(self, page: int) -> None:
        """Remove a page from the index."""
        content = self._content[page]
        if content is not None:
            bucket = content.parent, content.tokens[:4]
            siblings = self._pages[bucket]
            del siblings[page]
            if not siblings:
                del self._pages[bucket]
            self._content[page] = None

    def find(self, parent: bytes, tokens: bytes, unusable: set[int]) -> tuple[int, int] | None:
        """(page, shared tokens) of the page with most leading tokens in common; None for none."""
        best = None
        siblings = self._pages.get((parent, tokens[:4]), {})
        for page, _ in zip(reversed(siblings), range(_CANDIDATES), strict=False):
            content = self._content[page]
            assert content is not None
            if page not in unusable:
                count = content.common(tokens)
                if best is None or count > best[1]:
                    best = page, count
        return best
