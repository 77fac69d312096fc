"""Which sequences run in the next step, and how many tokens of each."""

import bisect
import heapq
import itertools

import numpy as np
from jaxtyping import Int

from rjax.batch.page_hash import block_bytes
from rjax.batch.page_operations import PageOperations
from rjax.batch.scheduled_sequence import ScheduledSequence
from rjax.batch.sequence import Sequence, SequenceStatus
from rjax.batch.step_limits import StepLimits
from rjax.engine.beginning import Beginning, BeginningFinder
from rjax.engine.block_manager import BlockManager
from rjax.engine.host_pool import HostPool
from rjax.engine.preemption import PreemptionCost
from rjax.engine.schedule import Schedule, StepInTheMaking

_RUNNING, _WAITING = SequenceStatus.RUNNING, SequenceStatus.WAITING


class Scheduler:
    """Continuous batching with chunked prefill under a token budget.

    Decodes come first, then prompt chunks of running sequences, then new sequences, each class in
    the order of ``Sequence.order``. A sequence is admitted when a slot is free and the pages of all
    its present tokens can be had; pages for further output are taken one at a time. When they run
    out, the running sequence that is last in order gives up its pages, and its siblings with it:
    they are copied to the host or computed again, as the cost model says.

    The first ``max_num_seqs`` of the running sequences have their turn. Those after them are ahead:
    of their tokens all but the last are computed, in what rows a step has to spare, and that one
    once one of the first ends. So nobody's place stays empty while a prompt is computed.

    Attributes:
        waiting, running, swapped: the queues, each in order; every live sequence is in one.
        page_table: row s lists the pages of the sequence in slot s; what lies beyond them is stale.
    """

    def __init__(
        self,
        blocks: BlockManager,
        *,
        limits: StepLimits,
        max_pages: int,
        enable_prefix_caching: bool,
        host: HostPool | None = None,
        cost: PreemptionCost | None = None,
    ) -> None:
        self.blocks = blocks
        self.host = host or HostPool(0)
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.swapped: list[Sequence] = []
        self.cost = cost or PreemptionCost()
        self.num_preemptions = 0
        self.num_swaps = 0
        self.page_table: Int[np.ndarray, "slots M"] = np.zeros(
            (limits.num_slots, max_pages), np.int32
        )
        self._finder = BeginningFinder(blocks, self.host, enable_prefix_caching)
        self._limits = limits
        self._caching = enable_prefix_caching
        self._slots = list(range(limits.num_slots - 1, -1, -1))
        self._operations = PageOperations()

    def add(self, sequence: Sequence) -> None:
        """Put a new sequence into the waiting queue."""
        self._queue(sequence, _WAITING)

    def schedule(self) -> Schedule:
        """Choose the next step; its tokens count as computed from now on."""
        self.blocks.begin_step()
        step = StepInTheMaking(self._limits)
        self._schedule_running(step)
        admitted = self._admit(step)
        return Schedule(step.items, admitted, self._operations.take())

    def finish(self, sequence: Sequence) -> None:
        """Take a sequence out of the engine and give its pages, slots and host memory back."""
        match sequence.status:
            case SequenceStatus.WAITING:
                self.waiting.remove(sequence)
            case SequenceStatus.SWAPPED:
                self.swapped.remove(sequence)
                self._drop_saved(sequence)
            case SequenceStatus.RUNNING:
                self._learn_tail(sequence, sequence.num_known)
                self._leave(sequence)
            case SequenceStatus.FINISHED:
                raise AssertionError("finished twice")
        sequence.status = SequenceStatus.FINISHED

    def learn(self, sequence: Sequence) -> None:
        """Offer the sequence's full pages of known tokens to the prefix tree."""
        if not self._caching or sequence.status is not _RUNNING:
            return
        S = self.blocks.page_size
        full = min(sequence.num_stored, sequence.num_known) // S
        if full <= sequence.num_registered:
            return
        hashes = sequence.hashes
        if len(hashes.keys) < full:
            start = len(hashes.keys) * S
            hashes.extend(sequence.tokens(start, full * S), start)
        for n in range(sequence.num_registered, full):
            self.blocks.register(
                sequence.pages[n], hashes.keys[n], hashes.parent(n), hashes.blocks[n]
            )
        sequence.num_registered = full

    def _learn_tail(self, sequence: Sequence, known: int) -> None:
        """Offer the tokens after its last full page, up to position ``known``."""
        self.learn(sequence)
        start = sequence.num_registered * self.blocks.page_size
        stop = min(sequence.num_stored, known)
        if self._caching and start < stop and sequence.num_registered >= sequence.num_borrowed:
            self.blocks.register_beginning(
                sequence.pages[sequence.num_registered],
                sequence.hashes.parent(sequence.num_registered),
                block_bytes(sequence.tokens(start, stop)),
            )

    def _schedule_running(self, step: StepInTheMaking) -> None:
        S = self.blocks.page_size
        decodes: list[Sequence] = []
        chunks: list[Sequence] = []
        ahead: list[Sequence] = []
        short: list[Sequence] = []
        most = self._limits.max_num_seqs
        for sequence in self.running:
            tokens = sequence.num_tokens
            if tokens >= sequence.max_length:
                continue  # its last token is still in flight
            if len(decodes) + len(chunks) == most:
                ahead.append(sequence)
                continue
            if tokens - sequence.num_computed > 1:
                chunks.append(sequence)
                continue
            decodes.append(sequence)
            stored = sequence.num_stored
            if tokens > sequence.capacity or (
                stored < sequence.num_borrowed * S and stored < tokens
            ):
                short.append(sequence)
        # All room is made before anything is scheduled, so that what runs is never preempted.
        for sequence in short:
            if sequence.status is _RUNNING:
                self._grow(sequence)
        if short:
            decodes, chunks, ahead = (
                [s for s in some if s.status is _RUNNING] for some in (decodes, chunks, ahead)
            )
        step.places = most - len(decodes) - len(chunks)
        for sequence in decodes:
            stop = sequence.num_tokens
            stored = sequence.num_stored
            step.items.append(
                ScheduledSequence(sequence, sequence.num_computed, stop, True, stored)
            )
            sequence.num_computed = stop
            if stored < stop:
                sequence.num_stored = stop
            if stop % S == 0:
                self.learn(sequence)
            elif stop == len(sequence.prompt_token_ids):  # the last of a prompt computed ahead
                self._learn_tail(sequence, stop)
            sequence.in_flight += 1
            sequence.num_tokens = stop + 1
        step.num_tokens = len(decodes)
        for sequence in chunks:
            self._take(sequence, step)
        for sequence in ahead:
            self._take_ahead(sequence, step)

    def _admit(self, step: StepInTheMaking) -> list[Sequence]:
        admitted: list[Sequence] = []
        if not self._slots or not step.has_room:
            return admitted
        queues = [list(self.swapped), list(self.waiting)]
        for sequence in heapq.merge(*queues, key=lambda s: s.order):
            if not self._slots or not step.has_room:
                break
            if sequence.in_flight:
                continue  # preempted; its last token is not read back yet
            beginning = self._finder.find(sequence)
            if beginning is None:
                continue
            if not self._seat(sequence, beginning, ahead=step.places == 0):
                break
            admitted.append(sequence)
            if step.places:
                step.places -= 1
                self._take(sequence, step)
            else:
                self._take_ahead(sequence, step)
        return admitted

    def _seat(self, sequence: Sequence, beginning: Beginning, *, ahead: bool) -> bool:
        """Give a sequence its pages and a slot; False where there are too few pages."""
        S = self.blocks.page_size
        # Room for the running ones to go on, so that it is not preempted the moment it is in.
        reserve = len(self.running) if ahead else len(self.running) // 4
        if self.running and self.blocks.num_available < sequence.group_pages + reserve:
            return False
        held = beginning.pages + ([] if beginning.tail is None else [beginning.tail])
        shared = sum(self.blocks.references(page) > 0 for page in held)
        self.blocks.acquire(held)
        stored = beginning.stored
        # A borrowed page must be copied before it is written into, unless nobody else wants it.
        copies = beginning.tail is not None and stored < sequence.num_tokens
        needed = self._pages_for(sequence.num_tokens) - len(held) + copies
        fresh = None
        if self.blocks.num_available >= needed + reserve:
            fresh = self.blocks.allocate(needed)
        elif not self.running and copies and self.blocks.num_available >= needed - 1:
            assert beginning.tail is not None
            if self.blocks.take_over(beginning.tail):
                copies = False
                fresh = self.blocks.allocate(needed - 1)
        if fresh is None:
            self.blocks.release(held)
            return False
        borrowed = len(held)
        if copies:
            assert beginning.tail is not None
            self._operations.copy(beginning.tail, fresh[0])
            self.blocks.release([beginning.tail])
            held.pop()
        if stored < sequence.num_tokens:
            borrowed = len(beginning.pages)
        if beginning.slots:
            self._operations.swap_in(beginning.slots, fresh[: len(beginning.slots)])
        self._unqueue(sequence)
        if sequence.group_pages:
            for sibling in sequence.siblings:
                sibling.group_pages = 0
        sequence.status = _RUNNING
        sequence.slot = self._slots.pop()
        sequence.pages = held + fresh
        sequence.capacity = len(sequence.pages) * S
        sequence.num_borrowed = borrowed
        sequence.num_registered = len(beginning.pages)
        sequence.num_stored = stored
        sequence.num_computed = min(stored, sequence.num_tokens - 1)
        self.page_table[sequence.slot, : len(sequence.pages)] = sequence.pages
        if sequence.num_cached is None:
            sequence.num_cached = sequence.num_computed
            sequence.num_shared = min(shared * S, sequence.num_computed)
        self._drop_saved(sequence)
        if self._caching:
            self.learn(sequence)
            self.blocks.promise(sequence.hashes.keys[sequence.num_registered :], sequence)
        bisect.insort(self.running, sequence, key=lambda s: s.order)
        return True

    def _take(self, sequence: Sequence, step: StepInTheMaking) -> None:
        """Schedule as much of a sequence as there is room for, up to its next token."""
        stop = min(sequence.num_tokens, sequence.num_computed + step.room)
        if stop > sequence.num_computed:
            self._compute(sequence, stop, step)

    def _take_ahead(self, sequence: Sequence, step: StepInTheMaking) -> None:
        """Schedule of a sequence ahead what fits into what the step has to spare."""
        stop = min(sequence.num_tokens - 1, sequence.num_computed + step.room_ahead)
        if stop > sequence.num_computed:
            self._compute(sequence, stop, step)
            step.seqs_ahead += 1

    def _compute(self, sequence: Sequence, stop: int, step: StepInTheMaking) -> None:
        start, stored = sequence.num_computed, sequence.num_stored
        samples = stop == sequence.num_tokens
        step.items.append(ScheduledSequence(sequence, start, stop, samples, stored))
        step.num_tokens += stop - start
        sequence.num_computed = stop
        sequence.num_stored = max(stored, stop)
        if samples:
            self._learn_tail(sequence, sequence.num_known)
            sequence.sample()
        else:
            self.learn(sequence)

    def _grow(self, sequence: Sequence) -> None:
        """Make sure that its next token can be written; it may have to be preempted itself."""
        S = self.blocks.page_size
        number = sequence.num_stored // S
        if number < sequence.num_borrowed and not self._own(sequence, number):
            return
        while sequence.num_tokens > sequence.capacity:
            fresh = self._allocate_one(sequence)
            if fresh is None:
                return
            assert sequence.slot is not None
            self.page_table[sequence.slot, len(sequence.pages)] = fresh
            sequence.pages.append(fresh)
            sequence.capacity += S

    def _own(self, sequence: Sequence, number: int) -> bool:
        """Make a borrowed page its own by copying it; False if it was preempted for it."""
        page = sequence.pages[number]
        if self.blocks.num_available or not self.blocks.take_over(page):
            fresh = self._allocate_one(sequence)
            if fresh is None:
                return False
            self._operations.copy(page, fresh)
            self.blocks.release([page])
            assert sequence.slot is not None
            sequence.pages[number] = fresh
            self.page_table[sequence.slot, number] = fresh
        sequence.num_borrowed = number
        return True

    def _allocate_one(self, sequence: Sequence) -> int | None:
        """A page for a running sequence, taken from the last in order if there is no other; None
        where that is the sequence itself."""
        while True:
            fresh = self.blocks.allocate(1)
            if fresh is not None:
                return fresh[0]
            victim = self.running[-1]
            if victim.is_sibling(sequence):
                self._preempt(victim)  # a request that is too large for the pool goes on in part
            else:
                self._preempt_group(victim)
            if victim is sequence:
                return None

    def _preempt_group(self, victim: Sequence) -> None:
        """Preempt the last in order with all its running siblings: what they share is given up
        only so, and is saved once. They come back when there is room for all of them."""
        group = list(itertools.takewhile(victim.is_sibling, reversed(self.running)))
        before = self.blocks.num_available
        for sequence in group:
            self._preempt(sequence)
        if len(group) > 1:
            for sequence in group:
                sequence.group_pages = self.blocks.num_available - before

    def _preempt(self, victim: Sequence) -> None:
        status = SequenceStatus.SWAPPED if self._swap_out(victim) else _WAITING
        self._learn_tail(victim, victim.num_known)
        self._leave(victim)
        victim.num_computed = victim.num_stored = victim.num_registered = 0
        victim.num_borrowed = victim.capacity = 0
        victim.num_preemptions += 1
        self.num_preemptions += 1
        self._queue(victim, status)

    def _swap_out(self, victim: Sequence) -> bool:
        """Copy its pages to the host, if that is cheaper than computing them and they fit there."""
        S = self.blocks.page_size
        keys = victim.hashes.keys[: victim.num_registered]
        wanted = [
            (number, page)
            for number, page in enumerate(victim.pages[: self._pages_for(victim.num_stored)])
            # What others hold too stays where it is, and is found again by its key.
            if number >= len(keys) or self.blocks.references(page) == 1
        ]
        tokens = min(victim.num_stored, len(wanted) * S)
        way = self.cost.choose(
            pages=len(wanted), tokens=tokens, has_siblings=victim.has_live_siblings
        )
        if way == "recompute" or self.host.num_free < len(wanted) or not wanted:
            return False
        pages, slots = [], []
        for number, page in wanted:
            key = keys[number] if number < len(keys) else None
            slot = None if key is None else self.host.find(key)
            if slot is not None:
                self.host.acquire(slot)
            else:
                slot = self.host.allocate(key)
                assert slot is not None
                pages.append(page)
                slots.append(slot)
            victim.host_slots[number] = slot
        victim.num_saved = victim.num_stored
        if pages:
            self._operations.swap_out(pages, slots)
        self.num_swaps += 1
        return True

    def _drop_saved(self, sequence: Sequence) -> None:
        self.host.release(sequence.host_slots.values())
        sequence.host_slots = {}
        sequence.num_saved = 0

    def _queue(self, sequence: Sequence, status: SequenceStatus) -> None:
        sequence.status = status
        queue = self.waiting if status is _WAITING else self.swapped
        bisect.insort(queue, sequence, key=lambda s: s.order)

    def _unqueue(self, sequence: Sequence) -> None:
        (self.waiting if sequence.status is _WAITING else self.swapped).remove(sequence)

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
