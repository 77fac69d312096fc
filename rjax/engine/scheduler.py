"""The scheduler: chooses the sequences of the next step and the tokens of each."""

import bisect

import numpy as np
from jaxtyping import Int

from rjax.batch.page_operations import PageOperation, PageOperations
from rjax.batch.scheduled_sequence import ScheduledSequence
from rjax.batch.sequence import Sequence, SequenceStatus
from rjax.batch.step_limits import StepLimits
from rjax.batch.step_worker import PoolSize
from rjax.engine.fair_shares import FairShares
from rjax.engine.pages.block_manager import BlockManager
from rjax.engine.pages.filler import PageFiller
from rjax.engine.pages.groups import make_groups, pages_numbered
from rjax.engine.pages.host_pool import HostPool
from rjax.engine.pages.matcher import PrefixMatch, PrefixMatcher
from rjax.engine.pages.registrar import PageRegistrar
from rjax.engine.pages.state_pages import StatePages
from rjax.engine.pages.state_pool import StatePool
from rjax.engine.pages.state_swapper import StateSwapper
from rjax.engine.pages.swapper import Swapper
from rjax.engine.preemption import PreemptionCost
from rjax.engine.schedule import Schedule, StepBuilder

_RUNNING, _WAITING = SequenceStatus.RUNNING, SequenceStatus.WAITING


class Scheduler:
    """Continuous batching with chunked prefill under a token budget.

    Decodes come first, then prompt chunks of running sequences, then new sequences, each class in
    the order of ``Sequence.order``; if they are of several shares, in that of `FairShares`. A
    sequence is admitted when a slot is free and the pool has the pages of all its present tokens;
    pages for further output are allocated one at a time. In page groups with windows, pages are
    allocated for each prompt chunk, and released behind the window. When the pool is full, the
    running sequence that is last in order is preempted, with its siblings: its pages are copied to
    the host or computed again, by the cost model.

    The first ``max_num_seqs`` running sequences generate. Those after them are prefill-ahead
    sequences: all their tokens but the last are computed, in the spare rows of steps, and the last
    one when a sequence before them ends. So a freed place is filled by a sequence whose prompt is
    computed already.

    Args:
        blocks: pages of the device.
        limits: limits of a step.
        max_pages: maximum number of pages of one sequence.
        enable_prefix_caching: keep pages of finished sequences for later prompts.
        pool: size of the pool; says which page groups there are, and the distance of snapshots.
        host: pages of the host; None for no swapping.
        cost: cost model of preemption; None for the default.
        states: state pages of the layers that have a state in place of KV; None without such.
        host_states: slots of the host for states; None for no swapping.

    Attributes:
        registrar: registers pages of running sequences in the prefix cache.
        waiting, running, swapped: the queues, each in order; every live sequence is in one.
        page_tables: page table of each page group, and that of the states behind them; row s lists
            the pages of the sequence in slot s. Entries of pages that it does not hold are stale;
            of states they are -1 between those that it holds.
        holds_new: reasons for which only sequences of requests that have started are admitted.
    """

    def __init__(
        self,
        blocks: BlockManager,
        *,
        limits: StepLimits,
        max_pages: int,
        enable_prefix_caching: bool,
        pool: PoolSize,
        host: HostPool | None = None,
        cost: PreemptionCost | None = None,
        states: StatePool | None = None,
        host_states: HostPool | None = None,
    ) -> None:
        self.blocks = blocks
        self.host, self.host_states = host or HostPool(0), host_states or HostPool(0)
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.swapped: list[Sequence] = []
        self.cost = cost or PreemptionCost()
        self.num_preemptions = 0
        self.holds_new: set[str] = set()
        self.page_tables: Int[np.ndarray, "groups slots M"] = np.zeros(
            (len(pool.windows) + (states is not None), limits.num_slots, max_pages), np.int32
        )
        self._operations = PageOperations()
        self.states = swapper = None
        if states is not None and pool.states is not None:
            stride = pool.states.snapshot_pages
            self.states = StatePages(states, self.page_tables[-1], stride, enable_prefix_caching)
            swapper = StateSwapper(self.states, self.host_states, pool.states, self._operations)
        of_groups = self.page_tables[: len(pool.windows)]
        self._groups = make_groups(blocks, pool.windows, of_groups, self.states)
        self._matcher = PrefixMatcher(self._groups, self.host, enable_prefix_caching)
        self.registrar = PageRegistrar(blocks, enable_prefix_caching, self.states)
        self._limits = limits
        self._shares = FairShares(limits.max_num_seqs)
        self._slots = list(range(limits.num_slots - 1, -1, -1))
        self._swapper = Swapper(
            blocks, self.host, self.cost, self._operations, self._groups, pool.page_bytes, swapper
        )

    @property
    def num_swaps(self) -> int:
        """Preemptions that swapped to host memory."""
        return self._swapper.num_swaps

    @property
    def has_waiting(self) -> bool:
        """Whether a sequence waits for the turn to generate."""
        return bool(len(self.running) > self._limits.max_num_seqs or self.waiting or self.swapped)

    def add(self, sequence: Sequence, share: str | None = None) -> None:
        """Put a new sequence of a share into the waiting queue."""
        self._shares.add(sequence, share)
        self._queue(sequence, _WAITING)

    def schedule(self) -> Schedule:
        """Choose the next step; its tokens count as computed from now on."""
        self.blocks.begin_step()
        if self.states is not None:
            self.states.pool.begin_step()
        if (victim := self._shares.arrange(self.running)) is not None:
            self.preempt(victim)
        step = StepBuilder(self._limits)
        self._schedule_running(step)
        admitted = self._admit(step)
        return Schedule(step.items, admitted, self._operations.take())

    def take_operations(self) -> list[PageOperation]:
        """Page operations of sequences that were preempted since the last step was planned."""
        return self._operations.take()

    def finish(self, sequence: Sequence) -> None:
        """Remove a sequence and free its pages, slots and host memory."""
        match sequence.status:
            case SequenceStatus.WAITING:
                self.waiting.remove(sequence)
            case SequenceStatus.SWAPPED:
                self.swapped.remove(sequence)
                self._swapper.release(sequence)
            case SequenceStatus.RUNNING:
                self.registrar.partial_page(sequence, sequence.num_known)
                self._leave(sequence)
            case SequenceStatus.FINISHED:
                raise AssertionError("finished twice")
        sequence.status, sequence.mask = SequenceStatus.FINISHED, None  # its memory is freed now
        self._shares.remove(sequence)

    def cache_full_pages(self, sequence: Sequence) -> None:
        """Register the sequence's full pages of known tokens in the prefix cache."""
        if sequence.status is _RUNNING:
            self.registrar.full_pages(sequence)

    def _schedule_running(self, step: StepBuilder) -> None:
        S = self.blocks.page_size
        decodes: list[Sequence] = []
        chunks: list[Sequence] = []
        prefill_ahead: list[Sequence] = []
        short_of_pages: list[Sequence] = []
        max_num_seqs = self._limits.max_num_seqs
        for sequence in self.running:
            if sequence.num_computed >= sequence.next_release_at:
                self._groups.release_unreached(sequence)
            tokens = sequence.num_tokens
            if tokens >= sequence.max_length or sequence.waits_for_mask:
                continue  # its last token is still in flight, or its mask is not ready
            if len(decodes) + len(chunks) == max_num_seqs:
                prefill_ahead.append(sequence)
                continue
            if tokens - sequence.num_computed > 1:
                chunks.append(sequence)
                continue
            decodes.append(sequence)
            stored = sequence.num_stored
            if tokens > sequence.capacity or (
                stored < sequence.num_borrowed * S and stored < tokens
            ):
                short_of_pages.append(sequence)
        # Pages are freed before anything is scheduled, so that no scheduled sequence is preempted.
        for sequence in short_of_pages:
            if sequence.status is _RUNNING:
                self._grow(sequence)
        if short_of_pages:
            decodes, chunks, prefill_ahead = (
                [s for s in group if s.status is _RUNNING]
                for group in (decodes, chunks, prefill_ahead)
            )
        step.free_slots = max_num_seqs - len(decodes) - len(chunks)
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
                self.cache_full_pages(sequence)
            elif stop == len(sequence.prompt_token_ids):  # the last token of a prefill-ahead prompt
                self.registrar.partial_page(sequence, stop)
            sequence.in_flight += 1
            sequence.num_tokens = stop + 1
        step.num_tokens = len(decodes)
        for sequence in chunks:
            self._schedule_tokens(sequence, step)
        for sequence in prefill_ahead:
            self._schedule_prefill_ahead(sequence, step)
        if step.short_of_pages and not step.items:
            self._make_room(chunks[0], step)

    def _make_room(self, sequence: Sequence, step: StepBuilder) -> None:
        """Preempt the last in order until the first prompt chunk has pages.

        Nothing may be scheduled yet.
        """
        while not step.items and self.running[-1] is not sequence:
            self._preempt_last(sequence)
            self._schedule_tokens(sequence, step)
        # Those before it wait for their last tokens, and end when these are read.
        assert step.items or len(self.running) > 1, "the pool holds one sequence of full length"

    def _admit(self, step: StepBuilder) -> list[Sequence]:
        admitted: list[Sequence] = []
        if not self._shares.may_admit(step, has_slot=bool(self._slots)):
            return admitted
        for sequence in self._shares.admission_order(self.swapped, self.waiting):
            has_slot = bool(self._slots)
            if not self._shares.may_admit(step, has_slot=has_slot):
                break
            if sequence.in_flight or sequence.mask_pending:
                continue  # preempted; its last token is not read back yet, or its mask not ready
            if self.holds_new and sequence.leader.num_cached is None:
                continue
            match = self._matcher.match(sequence)
            if match is None:
                continue
            ahead = step.free_slots == 0
            tokens = step.prefill_ahead_tokens_left if ahead else step.tokens_left
            if not (has_slot and self._start(sequence, match, prefill_ahead=ahead, tokens=tokens)):
                self._shares.wait(sequence)
                break
            admitted.append(sequence)
            if step.free_slots:
                step.free_slots -= 1
                self._schedule_tokens(sequence, step)
            else:
                self._schedule_prefill_ahead(sequence, step)
        return admitted

    def _start(
        self, sequence: Sequence, match: PrefixMatch, *, prefill_ahead: bool, tokens: int
    ) -> bool:
        """Give a sequence its pages and a slot; False if there are too few pages.

        Args:
            sequence: the sequence to start.
            match: KV that exists for it.
            prefill_ahead: whether its last token waits.
            tokens: most tokens that the step computes of it.
        """
        S = self.blocks.page_size
        # Pages for the next tokens of running sequences, so that it is not preempted at once.
        reserve = len(self.running) if prefill_ahead else len(self.running) // 4
        reserve *= len(self._groups)
        if self.running and self.blocks.num_available < sequence.group_pages + reserve:
            return False
        if self.running and self.states and not self.states.may_start(len(self.running)):
            return False
        taken = [page for pages in match.pages for page in pages if page >= 0]
        shared = match.num_shared_pages(self.blocks)
        self.blocks.acquire(taken)
        stored = match.num_tokens
        # A partial page is copied before it is written to, unless this is its only owner.
        has_partial = match.has_partial_page(S)
        copies = has_partial and stored < sequence.num_tokens
        at_start = [group.pages_at_start(stored, sequence.num_tokens) for group in self._groups]
        counts = [
            count - len(pages) + copies for count, pages in zip(at_start, match.pages, strict=True)
        ]
        needed = sum(counts)
        last = min(stored + (tokens if self.running else 1), sequence.num_tokens)
        in_chunk = sum(max(0, -(-last // S) - count) for count in at_start)
        fresh = None
        if self.blocks.num_available >= needed + in_chunk + reserve:
            fresh = self.blocks.allocate(needed)
        elif not self.running and copies:
            fits = len(counts) == 1 and self.blocks.num_available >= needed + in_chunk - 1
            if not (fits and self.blocks.take_over(taken[-1])):
                self.blocks.release(taken)
                without = self._matcher.match_full_pages(sequence)
                return self._start(sequence, without, prefill_ahead=prefill_ahead, tokens=tokens)
            copies, counts = False, [needed - 1]
            fresh = self.blocks.allocate(needed - 1)
        if fresh is None:
            self.blocks.release(taken)
            return False
        registered, borrowed = match.num_full_pages(S)
        if has_partial and not copies and stored == sequence.num_tokens:
            borrowed += 1
        filler = PageFiller(self.blocks, self._operations, fresh)
        held: list[list[int]] = [[] for _ in self._groups]
        # Copied partial pages are released in this order, those of endless groups last.
        for group in sorted(self._groups, key=lambda group: group.endless):
            g = group.index
            pages, slots = match.pages[g], match.host_slots[g]
            held[g] = filler.extended(pages, slots, copies=copies, count=counts[g])
        self._unqueue(sequence)
        if sequence.group_pages:
            for sibling in sequence.siblings:
                sibling.group_pages = 0
        sequence.status = _RUNNING
        sequence.slot = self._slots.pop()
        sequence.num_borrowed = borrowed
        sequence.num_registered = registered
        sequence.num_stored = stored
        computed = stored if match.num_computed is None else match.num_computed
        sequence.num_computed = min(computed, sequence.num_tokens - 1)
        if (swapper := self._swapper.states) is not None:
            swapper.start(sequence, match.saved_state, computed // S, branch=stored // S)
        self._groups.start(sequence, held)
        if sequence.num_cached is None:
            sequence.num_cached = sequence.num_computed
            sequence.num_shared = min(shared * S, sequence.num_computed)
        self._swapper.release(sequence)
        if self.registrar.caching:
            self.cache_full_pages(sequence)
            self.blocks.mark_pending(sequence.hashes.keys[sequence.num_registered :], sequence)
        self._shares.start(sequence, self.running)
        return True

    def _schedule_tokens(self, sequence: Sequence, step: StepBuilder) -> None:
        """Schedule the tokens of a sequence that fit, up to its last."""
        stop = min(sequence.num_tokens, sequence.num_computed + step.tokens_left)
        stop = self._extend(sequence, stop, step)
        if stop > sequence.num_computed:
            self._compute(sequence, stop, step)

    def _schedule_prefill_ahead(self, sequence: Sequence, step: StepBuilder) -> None:
        """Schedule the tokens of a prefill-ahead sequence that fit, up to its last but one."""
        stop = min(sequence.num_tokens - 1, sequence.num_computed + step.prefill_ahead_tokens_left)
        stop = self._extend(sequence, stop, step)
        if stop > sequence.num_computed:
            self._compute(sequence, stop, step)
            step.num_prefill_ahead += 1

    def _extend(self, sequence: Sequence, stop: int, step: StepBuilder) -> int:
        """Allocate pages up to a token; the one up to which they suffice."""
        found = self._groups.extend(sequence, stop)
        step.short_of_pages |= found < stop
        return found

    def _compute(self, sequence: Sequence, stop: int, step: StepBuilder) -> None:
        start, stored = sequence.num_computed, sequence.num_stored
        samples = stop == sequence.num_tokens
        step.items.append(ScheduledSequence(sequence, start, stop, samples, stored))
        step.num_tokens += stop - start
        sequence.num_computed = stop
        sequence.num_stored = max(stored, stop)
        if samples:
            self.registrar.partial_page(sequence, sequence.num_known)
            sequence.sample()
        else:
            self.cache_full_pages(sequence)

    def _grow(self, sequence: Sequence) -> None:
        """Allocate the pages of its next token; may preempt the sequence itself."""
        S = self.blocks.page_size
        number = sequence.num_stored // S
        if number < sequence.num_borrowed and not self._copy_on_write(sequence, number):
            return
        missing = -(-sequence.num_tokens // self.blocks.page_size)
        for group in self._groups:
            while len(sequence.pages[group.index]) < missing:
                fresh = self._allocate_one(sequence)
                if fresh is None:
                    return
                group.append(sequence, [fresh])
        if self.states is not None:
            while self.states.extend(sequence, sequence.num_tokens) < sequence.num_tokens:
                if self._preempt_last(sequence) is sequence:
                    return
            self._groups.set_next_release(sequence)
        self._groups.set_capacity(sequence)

    def _copy_on_write(self, sequence: Sequence, number: int) -> bool:
        """Copy a page that others hold before the sequence writes to it.

        The last owner of a page of a full pool takes it over instead. False if the sequence was
        preempted.
        """
        for group, page in pages_numbered(sequence, number):
            if self.blocks.num_available or not self.blocks.take_over(page):
                fresh = self._allocate_one(sequence)
                if fresh is None:
                    return False
                self._operations.copy(page, fresh)
                self.blocks.release([page])
                self._groups.groups[group].replace(sequence, number, fresh)
        sequence.num_borrowed = number
        return True

    def _allocate_one(self, sequence: Sequence) -> int | None:
        """A page for a running sequence; in a full pool the last in order is preempted for it.

        None if the sequence itself was preempted.
        """
        while True:
            fresh = self.blocks.allocate(1)
            if fresh is not None:
                return fresh[0]
            if self._preempt_last(sequence) is sequence:
                return None

    def _preempt_last(self, sequence: Sequence) -> Sequence:
        """Preempt the last in order, so that a running sequence gets pages; returns it."""
        victim = self.running[-1]
        if victim.is_sibling(sequence):
            self.preempt(victim)  # a request larger than the pool runs in part
        else:
            self._preempt_group(victim)
        return victim

    def _preempt_group(self, victim: Sequence) -> None:
        """Preempt the last in order with all its running siblings.

        Only then are the pages that they share freed; they are saved once. The siblings resume when
        the pool has pages for all of them.
        """
        group = [s for s in reversed(victim.siblings) if s.status is _RUNNING] or [victim]
        before = self.blocks.num_available
        for sequence in group:
            self.preempt(sequence)
        if len(group) > 1:
            for sequence in group:
                sequence.group_pages = self.blocks.num_available - before

    def preempt_all(self) -> None:
        """Put all running and swapped sequences back into the waiting queue; nothing is saved."""
        for sequence in list(self.running):
            self.preempt(sequence, may_swap=False)
        for sequence in list(self.swapped):
            self._unqueue(sequence)
            self._swapper.release(sequence)
            self._queue(sequence, _WAITING)
        self._operations.take()

    def preempt(self, victim: Sequence, *, may_swap: bool = True) -> None:
        """Put a running sequence back into a queue and free its pages."""
        swapped = may_swap and self._swapper.swap_out(victim)
        status = SequenceStatus.SWAPPED if swapped else _WAITING
        self.registrar.partial_page(victim, victim.num_known)
        self._leave(victim)
        victim.num_computed = victim.num_stored = 0
        victim.num_registered = victim.num_borrowed = victim.capacity = 0
        victim.num_preemptions += 1
        self.num_preemptions += 1
        self._queue(victim, status)

    def _queue(self, sequence: Sequence, status: SequenceStatus) -> None:
        sequence.status = status
        queue = self.waiting if status is _WAITING else self.swapped
        bisect.insort(queue, sequence, key=lambda s: s.order)

    def _unqueue(self, sequence: Sequence) -> None:
        (self.waiting if sequence.status is _WAITING else self.swapped).remove(sequence)

    def _leave(self, sequence: Sequence) -> None:
        assert sequence.slot is not None
        self._shares.leave(sequence, self.running)
        self.blocks.clear_pending(sequence.hashes.keys[sequence.num_registered :], sequence)
        self._groups.release(sequence)
        self._slots.append(sequence.slot)
        sequence.slot = None
