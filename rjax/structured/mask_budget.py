"""Budgets of the processor time that masks take, which all requests share."""

import threading
import time
from collections import OrderedDict

_SECONDS_PER_TOKEN = 0.001  # that each token adds to a request's budget
_SLOW = 0.01  # seconds of a mask that an owner's budget counts
_WINDOW = 60.0  # seconds in which an owner's budget is full again
_QUICK_AFTER = 16  # masks of a constraint, none of them slow
_QUICK_CONSTRAINTS = 1024  # remembered for each owner


class OwnerBudget:
    """The processor time that slow masks of one owner may take within a minute; thread-safe.

    While nothing of it is left, the owner's grammars are refused, except those whose masks were
    quick before.

    Args:
        seconds: processor time of masks that take more than 10 ms each.
    """

    def __init__(self, seconds: float) -> None:
        self._most = self._left = seconds
        self._time = time.monotonic()
        self._lock = threading.Lock()
        self._quick: OrderedDict[int, int] = OrderedDict()  # masks of constraints, by their hash

    def wait(self, constraint: int) -> float:
        """Seconds until masks of this constraint, given by its hash, are made again; 0 for now."""
        if self._left >= 0 or self._quick.get(constraint, 0) >= _QUICK_AFTER:
            return 0.0
        with self._lock:
            self._refill()
            return max(0.0, -self._left / self._most * _WINDOW)

    def count(self, constraint: int, seconds: float) -> None:
        """Count a mask of a constraint."""
        if seconds > _SLOW:
            with self._lock:
                self._quick.pop(constraint, None)
                self._refill()
                self._left -= seconds
        elif (masks := self._quick.get(constraint, 0)) < _QUICK_AFTER:
            with self._lock:
                self._quick[constraint] = masks + 1
                self._quick.move_to_end(constraint)
                if len(self._quick) > _QUICK_CONSTRAINTS:
                    self._quick.popitem(last=False)

    def message(self, wait: float) -> str:
        """Why a grammar is refused."""
        return (
            f"slow masks of this key's grammars took more than {self._most:g} s within a minute; "
            f"ask again in {max(1, round(wait))} s, with simpler grammars"
        )

    def _refill(self) -> None:
        now = time.monotonic()
        self._left = min(self._most, self._left + (now - self._time) * self._most / _WINDOW)
        self._time = now


class MaskBudget:
    """The processor time that one request's masks may take.

    Args:
        seconds: initial budget; each token adds ``_SECONDS_PER_TOKEN``.
        one_mask: most seconds of one mask.
        owner: budget of the request's owner.
        constraint: hash of the request's constraint.

    Attributes:
        exceeded: message that says what `spend` found too long.
    """

    def __init__(
        self, seconds: float, one_mask: float, owner: OwnerBudget, constraint: int
    ) -> None:
        self._left, self._one_mask = seconds, one_mask
        self._owner, self._constraint = owner, constraint
        self.exceeded = "the grammar takes too long at each token"

    def refusal(self) -> str | None:
        """Why no further mask may be made now; None if one may."""
        wait = self._owner.wait(self._constraint)
        return self._owner.message(wait) if wait else None

    def spend(self, seconds: float) -> bool:
        """Subtract the time of one token's mask. Return whether it was within the budget."""
        self._owner.count(self._constraint, seconds)
        if seconds > self._one_mask:
            self.exceeded = (
                f"the grammar takes {seconds:.2f} s at one token; {self._one_mask:g} s are allowed"
            )
            return False
        self._left += _SECONDS_PER_TOKEN - seconds
        return self._left >= 0
