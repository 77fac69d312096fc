"""Which sequences run in the next step, and how many tokens of each."""

import bisect
import dataclasses

from rjax.engine.block_manager import BlockManager
from rjax.engine.sequence import Sequence, SequenceStatus


@dataclasses.dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """A run of tokens of one sequence: positions [start, stop) are computed in this step.

    ``samples`` says whether the run reaches the sequence's end, so that a token is sampled.
    """

    sequence: Sequence
    start: int
    stop: int
    samples: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Schedule:
    """One step: what runs, and which sequences enter the running set (their slots are new)."""

    scheduled: list[ScheduledSequence]
    admitted: list[Sequence]

    @property
    def num_tokens(self) -> int:
        """Tokens computed in the step."""
        return sum(item.stop - item.start for item in self.scheduled)


class Scheduler:
    """Continuous batching with chunked prefill under a token budget.

    Decodes come first, then prompt chunks of running sequences, then new sequences, each class in
    order of (priority, arrival). A sequence is admitted when a slot is free and the pages of all
    its present tokens can be had; pages for further output are taken one at a time. When they run
    out, the running sequence that is last in order gives up its pages and waits to be computed
    again. A sequence whose next page another running one is about to compute waits for that page
    instead of computing it twice; it can start in the very step that computes it, since a step
    writes all KV of a layer before it reads any.
    """

    def __init__(
        self,
        blocks: BlockManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        enable_prefix_caching: bool,
    ) -> None:
        self.blocks = blocks
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self._budget = max_num_batched_tokens
        self._caching = enable_prefix_caching
        self._slots = list(range(max_num_seqs - 1, -1, -1))

    def add(self, sequence: Sequence) -> None:
        """Put a new or preempted sequence into the waiting queue."""
        sequence.status = SequenceStatus.WAITING
        bisect.insort(self.waiting, sequence, key=lambda s: s.order)

    def schedule(self) -> Schedule:
        """Choose the next step; its tokens count as computed from now on."""
        items: dict[Sequence, ScheduledSequence] = {}
        budget = self._schedule_running(items, self._budget)
        admitted = self._admit(items, budget)
        return Schedule(list(items.values()), admitted)

    def finish(self, sequence: Sequence) -> None:
        """Take a sequence out of the engine and give its pages and slot back."""
        if sequence.status is SequenceStatus.WAITING:
            self.waiting.remove(sequence)
        elif sequence.status is SequenceStatus.RUNNING:
            self._leave(sequence)
        sequence.status = SequenceStatus.FINISHED

    def learn(self, sequence: Sequence) -> None:
        """Offer the sequence's full pages of known tokens to the prefix cache."""
        if not self._caching or sequence.status is not SequenceStatus.RUNNING:
            return
        S = self.blocks.page_size
        full = min(sequence.num_computed, sequence.num_known) // S
        if full <= sequence.num_registered:
            return
        keys = sequence.hashes.keys
        if len(keys) < full:
            start = len(keys) * S
            sequence.hashes.extend(sequence.tokens(start, full * S), start)
        for page in range(sequence.num_registered, full):
            self.blocks.register(sequence.pages[page], keys[page])
        sequence.num_registered = full

    def _schedule_running(self, items: dict[Sequence, ScheduledSequence], budget: int) -> int:
        decodes_first = sorted(
            self.running, key=lambda s: (s.num_tokens - s.num_computed > 1, s.order)
        )
        for sequence in decodes_first:
            if sequence.status is not SequenceStatus.RUNNING:
                continue  # preempted for one before it
            pending = sequence.num_tokens - sequence.num_computed
            if pending == 0 or sequence.num_outputs >= sequence.max_tokens:
                continue  # its last token is still in flight
            if sequence.awaits_token:
                continue
            if budget == 0:
                break
            if self._grow(sequence, items):
                budget -= self._take(sequence, min(pending, budget), items)
        return budget

    def _admit(self, items: dict[Sequence, ScheduledSequence], budget: int) -> list[Sequence]:
        admitted: list[Sequence] = []
        for sequence in list(self.waiting):
            if budget == 0 or not self._slots:
                break
            if sequence.in_flight:
                continue  # preempted; its last token is not read back yet
            matched = self._match(sequence)
            if matched is None:
                continue
            self.blocks.acquire(matched)
            needed = self._pages_for(sequence.num_tokens) - len(matched)
            # Room for the running ones to go on, so that it is not preempted the moment it is in.
            reserve = len(self.running) // 4
            room = self.blocks.num_available >= needed + reserve
            fresh = self.blocks.allocate(needed) if room else None
            if fresh is None:
                self.blocks.release(matched)
                break
            self.waiting.remove(sequence)
            sequence.status = SequenceStatus.RUNNING
            sequence.slot = self._slots.pop()
            sequence.pages = matched + fresh
            sequence.num_registered = len(matched)
            sequence.num_computed = len(matched) * self.blocks.page_size
            if sequence.num_cached is None:
                sequence.num_cached = sequence.num_computed
            if self._caching:
                self.blocks.promise(sequence.hashes.keys[len(matched) :], sequence)
            bisect.insort(self.running, sequence, key=lambda s: s.order)
            admitted.append(sequence)
            pending = sequence.num_tokens - sequence.num_computed
            budget -= self._take(sequence, min(pending, budget), items)
        return admitted

    def _match(self, sequence: Sequence) -> list[int] | None:
        """Cached pages of its beginning, or None to wait for a page that is being computed.

        The last token is never taken from the cache: its logits are wanted.
        """
        if not (self._caching and sequence.reads_cache):
            return []
        S = self.blocks.page_size
        keys = sequence.hashes.keys
        if len(keys) < sequence.num_known // S:
            start = len(keys) * S
            sequence.hashes.extend(sequence.tokens(start, sequence.num_known), start)
        usable = keys[: (sequence.num_tokens - 1) // S]
        matched = self.blocks.match(usable)
        if len(matched) < len(usable) and self.blocks.is_promised(usable[len(matched)]):
            return None
        return matched

    def _take(
        self, sequence: Sequence, count: int, items: dict[Sequence, ScheduledSequence]
    ) -> int:
        start = sequence.num_computed
        stop = start + count
        sequence.num_computed = stop
        samples = stop == sequence.num_tokens
        items[sequence] = ScheduledSequence(sequence, start, stop, samples)
        self.learn(sequence)
        if samples:
            sequence.in_flight += 1
        return count

    def _grow(self, sequence: Sequence, items: dict[Sequence, ScheduledSequence]) -> bool:
        """Make sure that its pages hold all its tokens; False if it had to be preempted itself."""
        missing = self._pages_for(sequence.num_tokens) - len(sequence.pages)
        while missing > 0:
            fresh = self.blocks.allocate(missing)
            if fresh is not None:
                sequence.pages += fresh
                break
            victim = self.running[-1]
            self._preempt(victim, items)
            if victim is sequence:
                return False
        return True

    def _preempt(self, victim: Sequence, items: dict[Sequence, ScheduledSequence]) -> None:
        # Only decodes need new pages, and they go in order, so the last in order has no turn yet.
        assert victim not in items
        self._leave(victim)
        victim.num_computed = victim.num_registered = 0
        self.num_preemptions += 1
        self.add(victim)

    def _leave(self, sequence: Sequence) -> None:
        assert sequence.slot is not None
        self.running.remove(sequence)
        self.blocks.break_promises(sequence.hashes.keys[sequence.num_registered :], sequence)
        self.blocks.release(sequence.pages)
        sequence.pages = []
        self._slots.append(sequence.slot)
        sequence.slot = None

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self.blocks.page_size)
