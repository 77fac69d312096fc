"""Finding a page by the tokens it holds, below the granularity of whole pages."""

import dataclasses

import numpy as np

_CANDIDATES = 8  # pages compared in one look-up


@dataclasses.dataclass(frozen=True, slots=True)
class PageContent:
    """What a page holds, or will hold by work dispatched already.

    Attributes:
        parent: chain key of the pages before it.
        tokens: as the bytes of an int32 array, a whole page or its beginning.
    """

    parent: bytes
    tokens: bytes

    @property
    def num_tokens(self) -> int:
        """Tokens known to be there."""
        return len(self.tokens) // 4

    def common(self, tokens: bytes) -> int:
        """Leading tokens that equal these."""
        size = min(len(tokens), len(self.tokens))
        if self.tokens[:size] == tokens[:size]:
            return size // 4
        mine, theirs = (np.frombuffer(t, np.int32, size // 4) for t in (self.tokens, tokens))
        return int((mine != theirs).argmax())


class PageIndex:
    """Pages by what comes before them and by their first token.

    Many pages can follow one beginning; a look-up compares the eight that were added last, so that
    its cost has a bound.
    """

    def __init__(self, num_pages: int) -> None:
        self._content: list[PageContent | None] = [None] * num_pages
        self._pages: dict[tuple[bytes, bytes], dict[int, None]] = {}

    def content(self, page: int) -> PageContent | None:
        """What a page is known to hold."""
        return self._content[page]

    def put(self, page: int, content: PageContent) -> None:
        """Say what a page holds, in place of what was said before."""
        self.remove(page)
        self._content[page] = content
        self._pages.setdefault((content.parent, content.tokens[:4]), {})[page] = None

    def remove(self, page: int) -> None:
        """Forget a page."""
        content = self._content[page]
        if content is not None:
            place = content.parent, content.tokens[:4]
            siblings = self._pages[place]
            del siblings[page]
            if not siblings:
                del self._pages[place]
            self._content[page] = None

    def find(self, parent: bytes, tokens: bytes, unusable: set[int]) -> tuple[int, int] | None:
        """The page that begins with most of these tokens, and with how many; None for none."""
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
