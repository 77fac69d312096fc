"""FairShares: divides the rows of steps evenly among the shares that have sequences."""

import heapq
import itertools
from bisect import insort
from collections import Counter, deque
from collections.abc import Iterator

from rjax.batch.sequence import Sequence, SequenceStatus
from rjax.engine.schedule import StepBuilder

PATIENCE = 8
"""Steps that a share waits for a row to end before a row of another share is preempted for it."""

_MAX_TURNS = 4096  # shares whose last turn is known; an older one counts as none
_QUEUED = SequenceStatus.WAITING, SequenceStatus.SWAPPED


def _order(sequence: Sequence) -> tuple[int, int, int]:
    return sequence.order


class FairShares:
    """Max-min fairness of running sequences (rows) over the shares of `Sequence.share`.

    A free row goes to the waiting share with the fewest rows; of equal shares, to the one whose
    last turn is longest ago. The running sequences are in fair order: the first of each share, then
    the second of each, and so on. So those that generate, which are the first, are divided evenly,
    and the last one, which is preempted for want of pages, belongs to a share with the most rows.
    If a share waits while another has at least two rows more, a row is preempted for it after
    `PATIENCE` steps, one in each step.

    Within a share, `Sequence.order` decides. With a single share it decides everything.

    Args:
        max_num_seqs: leading running sequences that generate.
    """

    def __init__(self, max_num_seqs: int) -> None:
        self._max_num_seqs = max_num_seqs
        self._live: Counter[str | None] = Counter()  # unfinished sequences of each share
        self._rows: Counter[str | None] = Counter()  # running sequences of each share
        self._turns: dict[str | None, int] = {}  # number of each share's last turn, oldest first
        self._next_turn = itertools.count()
        self._generating: set[Sequence] = set()  # running sequences that have had their turn
        self._stale = False  # whether the running sequences may be out of order
        self._blocked: Sequence | None = None
        self._steps_waited = 0

    @property
    def several(self) -> bool:
        """Whether more than one share has sequences."""
        return len(self._live) > 1

    @property
    def uneven(self) -> bool:
        """Whether a share waits while another has at least two rows more."""
        if not self.several or not self._rows:
            return False
        rows = self._rows
        waiting = [rows[share] for share, live in self._live.items() if live > rows[share]]
        return bool(waiting) and max(rows.values()) - min(waiting) > 1

    def add(self, sequence: Sequence, share: str | None) -> None:
        """Note a new sequence of a share."""
        sequence.share = share
        self._stale |= share not in self._live
        self._live[share] += 1

    def remove(self, sequence: Sequence) -> None:
        """Note that a sequence, which does not run, has finished."""
        self._live[sequence.share] -= 1
        if not self._live[sequence.share]:
            del self._live[sequence.share]
            self._stale = True

    def start(self, sequence: Sequence, running: list[Sequence]) -> None:
        """Put a sequence among the running ones."""
        self._rows[sequence.share] += 1
        if self.several:
            running.append(sequence)
            self._stale = True
        else:
            insort(running, sequence, key=_order)

    def leave(self, sequence: Sequence, running: list[Sequence]) -> None:
        """Take a sequence from the running ones."""
        running.remove(sequence)
        self._generating.discard(sequence)
        self._rows[sequence.share] -= 1
        if not self._rows[sequence.share]:
            del self._rows[sequence.share]
        self._stale |= self.several

    def arrange(self, running: list[Sequence]) -> Sequence | None:
        """Put the running sequences into fair order.

        Returns:
            The one to preempt for a share that has waited too long; None for none.
        """
        if self._stale:
            self._stale = False
            running.sort(key=_order)
            if self.several:
                running[:] = self._fair_order(running)
            else:
                self._generating.clear()
                self._turns.clear()
        if not self._steps_waited:
            return None
        return self._overdue(running)

    def may_admit(self, step: StepBuilder, *, has_slot: bool) -> bool:
        """Whether a queued sequence may start now, or if another share gives a slot away.

        A share that is behind does not wait for tokens of prefill ahead: its sequence is among
        those that generate in the next step.
        """
        if has_slot and step.can_admit:
            return True
        return step.tokens_left > 0 and not step.short_of_pages and self.uneven

    def admission_order(
        self, swapped: list[Sequence], waiting: list[Sequence]
    ) -> Iterator[Sequence]:
        """The queued sequences, those of the share with the fewest rows first.

        Sequences may be started while this runs.

        Args:
            swapped, waiting: the queues, each in the order of `Sequence.order`.
        """
        queued = heapq.merge(list(swapped), list(waiting), key=_order)
        if not self.several:
            yield from queued
            return
        queues: dict[str | None, deque[Sequence]] = {}
        for sequence in queued:
            queues.setdefault(sequence.share, deque()).append(sequence)
        shares = [(*self._standing(share), n, share) for n, share in enumerate(queues)]
        heapq.heapify(shares)
        while shares:
            _, _, n, share = shares[0]
            yield queues[share].popleft()
            if queues[share]:
                heapq.heapreplace(shares, (*self._standing(share), n, share))
            else:
                heapq.heappop(shares)

    def wait(self, sequence: Sequence) -> None:
        """Note that a sequence, the first in `admission_order`, has no slot or too few pages."""
        if self.uneven:
            self._blocked = sequence
            self._steps_waited += 1

    def _standing(self, share: str | None) -> tuple[int, int]:
        """Rows and last turn of a share; the least goes first."""
        return self._rows[share], self._turns.get(share, -1)

    def _fair_order(self, running: list[Sequence]) -> list[Sequence]:
        """Running sequences, which are in the order of `Sequence.order`, in fair order.

        At equal rank the share whose first sequence arrived first goes first. This order does not
        change by preemptions, so the first sequence is never preempted for pages and all finish.
        Priority does not count between shares.
        """
        groups: dict[str | None, list[Sequence]] = {}
        for sequence in running:
            groups.setdefault(sequence.share, []).append(sequence)
        columns = sorted(groups.values(), key=lambda group: group[0].order[1:])
        ranks = itertools.zip_longest(*columns)
        arranged = [s for s in itertools.chain.from_iterable(ranks) if s is not None]
        most = self._max_num_seqs
        if most < len(arranged):
            self._share_last_rank(arranged, columns)
        for sequence in arranged[:most]:
            if sequence not in self._generating:
                self._generating.add(sequence)
                self._take_turn(sequence.share)
        return arranged

    def _share_last_rank(self, arranged: list[Sequence], columns: list[list[Sequence]]) -> None:
        """Order the rank of which only some generate: those that do already stay, and shares take
        turns."""
        most = self._max_num_seqs
        rank = most // len(columns)
        start = sum(min(len(column), rank) for column in columns)
        size = sum(len(column) > rank for column in columns)
        while start + size <= most:
            start, rank = start + size, rank + 1
            size = sum(len(column) > rank for column in columns)
        arranged[start : start + size] = sorted(
            arranged[start : start + size],
            key=lambda s: (s not in self._generating, self._turns.get(s.share, -1)),
        )

    def _take_turn(self, share: str | None) -> None:
        self._turns.pop(share, None)
        self._turns[share] = next(self._next_turn)
        if len(self._turns) > _MAX_TURNS:
            del self._turns[next(iter(self._turns))]

    def _overdue(self, running: list[Sequence]) -> Sequence | None:
        blocked, self._blocked = self._blocked, None
        if not self.uneven:
            self._steps_waited = 0
            return None
        if blocked is None or blocked.status not in _QUEUED or self._steps_waited <= PATIENCE:
            return None
        victim = running[-1]
        return victim if self._rows[victim.share] - self._rows[blocked.share] > 1 else None
