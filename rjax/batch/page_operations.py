"""Copies of pages and states that run before a step."""

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


@dataclasses.dataclass(frozen=True, slots=True)
class SwapOutState:
    """Copy the state of a sequence to a host slot for states.

    Attributes:
        page: its state page; None copies none.
        slot: its sampler slot, whose tail is copied; None copies none.
        host_slot: the host slot.
    """

    page: int | None
    slot: int | None
    host_slot: int


@dataclasses.dataclass(frozen=True, slots=True)
class SwapInState:
    """Copy a host slot for states to the device.

    Attributes:
        host_slot: the host slot.
        page: state page that is filled; None if the host slot has none.
        slot: sampler slot whose tail is filled; None if the host slot has none.
    """

    host_slot: int
    page: int | None
    slot: int | None


type KvOperation = CopyPages | SwapOut | SwapIn
type StateOperation = SwapOutState | SwapInState
type PageOperation = KvOperation | StateOperation


class PageOperations:
    """Collects the operations of a step, and merges those of KV pages as far as their order allows.

    Those of states follow: they share no memory with the others.
    """

    def __init__(self) -> None:
        self._list: list[KvOperation] = []
        self._states: list[StateOperation] = []
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

    def swap_state(self, operation: StateOperation) -> None:
        """Copy a state."""
        self._states.append(operation)

    def take(self) -> list[PageOperation]:
        """The operations since the last call, in order."""
        states, self._states = self._states, []
        return [*self.take_kv(), *states]

    def take_kv(self) -> list[KvOperation]:
        """The operations on pages of KV since the last call, in order."""
        taken, self._list = self._list, []
        return taken
