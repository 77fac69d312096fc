"""Reference counts of the host slots of swapped pages."""

from collections.abc import Iterable


class HostPool:
    """Allocates host slots, one page each.

    A full page that several swapped sequences share takes one slot, which is found by its chain
    key. free + used = total at all times; every operation is O(1) a slot.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self._references: dict[int, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._slot_of: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """Free slots."""
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
        """Take a slot, indexed by ``key`` if given; None if all are used."""
        if not self._free:
            return None
        slot = self._free.pop()
        self._references[slot] = 1
        if key is not None:
            self._slot_of[key] = slot
            self._key_of[slot] = key
        return slot

    def release(self, slots: Iterable[int]) -> None:
        """Release one reference on each slot."""
        for slot in slots:
            self._references[slot] -= 1
            if self._references[slot] == 0:
                del self._references[slot]
                key = self._key_of.pop(slot, None)
                if key is not None:
                    del self._slot_of[key]
                self._free.append(slot)
