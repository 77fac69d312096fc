"""Copies of pages that run before a step."""

import dataclasses


@dataclasses.dataclass(slots=True)
class CopyPages:
    """Copy whole pages, ``source[i]`` to ``target[i]``; no page is read after it is written."""

    source: list[int]
    target: list[int]


@dataclasses.dataclass(slots=True)
class SwapOut:
    """Copy pages of the device to host slots."""

    pages: list[int]
    slots: list[int]


@dataclasses.dataclass(slots=True)
class SwapIn:
    """Copy host slots to pages of the device."""

    slots: list[int]
    pages: list[int]


type PageOperation = CopyPages | SwapOut | SwapIn


class PageOperations:
    """Collects the operations of a step and merges them as far as their order allows."""

    def __init__(self) -> None:
        self._list: list[PageOperation] = []
        self._written: set[int] = set()  # pages that the last operation writes

    def copy(self, source: int, target: int) -> None:
        """Copy one page."""
        last = self._list[-1] if self._list else None
        if isinstance(last, CopyPages) and not self._written & {source, target}:
            last.source.append(source)
            last.target.append(target)
        else:
            self._list.append(CopyPages([source], [target]))
            self._written.clear()
        self._written.add(target)

    def swap_out(self, pages: list[int], slots: list[int]) -> None:
        """Copy pages to host slots."""
        last = self._list[-1] if self._list else None
        if isinstance(last, SwapOut):
            last.pages += pages
            last.slots += slots
        else:
            self._list.append(SwapOut(list(pages), list(slots)))

    def swap_in(self, slots: list[int], pages: list[int]) -> None:
        """Copy host slots to pages."""
        last = self._list[-1] if self._list else None
        if isinstance(last, SwapIn) and self._written.isdisjoint(pages):
            last.slots += slots
            last.pages += pages
        else:
            self._list.append(SwapIn(list(slots), list(pages)))
            self._written.clear()
        self._written.update(pages)

    def take(self) -> list[PageOperation]:
        """The operations since the last call, in order."""
        taken, self._list = self._list, []
        return taken
