"""Which slot of the host's memory holds which swapped page."""

from collections.abc import Iterable


class HostPool:
    """Reference counts of the host slots that swapped-out pages are kept in.

    A full page that several swapped sequences share is kept once: a slot with a chain key is found
    by it. free + used = total at every moment; every operation is O(1) a slot.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self._references: dict[int, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._slot_of: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """Slots that can be taken."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Slots that hold a page."""
        return len(self._references)

    def find(self, key: bytes) -> int | None:
        """The slot that holds the page of this chain key."""
        return self._slot_of.get(key)

    def acquire(self, slot: int) -> None:
        """Take one more reference on a used slot."""
        self._references[slot] += 1

    def allocate(self, key: bytes | None) -> int | None:
        """Take a slot, to be found by this key if it has one; None if all are used."""
        if not self._free:
            return None
        slot = self._free.pop()
        self._references[slot] = 1
        if key is not None:
            self._slot_of[key] = slot
            self._key_of[slot] = key
        return slot

    def release(self, slots: Iterable[int]) -> None:
        """Give back one reference on each slot."""
        for slot in slots:
            self._references[slot] -= 1
            if self._references[slot] == 0:
                del self._references[slot]
                key = self._key_of.pop(slot, None)
                if key is not None:
                    del self._slot_of[key]
                self._free.append(slot)
