"""Finds the KV that exists for the leading tokens of a sequence."""

import dataclasses

from rjax.batch.page_hash import block_bytes, group_key
from rjax.batch.sequence import SavedState, Sequence, SequenceStatus
from rjax.engine.pages.block_manager import BlockManager
from rjax.engine.pages.groups import GroupPages, PageGroup
from rjax.engine.pages.host_pool import HostPool


@dataclasses.dataclass(slots=True)
class PrefixMatch:
    """KV of the leading tokens of a sequence.

    Attributes:
        pages: device pages of each page group, in order; -1 for those that the next token does not
            reach. A partial page, if there is one, is the last of them.
        host_slots: host slots of the pages after ``pages``, in each page group.
        num_tokens: leading tokens of the sequence whose KV all these hold.
        num_computed: leading tokens that need not be computed; None where all whose KV is held need
            not, because no layer has a state.
        saved_state: the saved state that a swapped sequence goes on from; None for a cached one.
    """

    pages: list[list[int]]
    host_slots: list[list[int]]
    num_tokens: int = 0
    num_computed: int | None = None
    saved_state: SavedState | None = None

    def has_partial_page(self, page_size: int) -> bool:
        """Whether the last page of each group is a device page that is filled in part."""
        return self.num_tokens % page_size > 0 and not any(self.host_slots)

    def num_shared_pages(self, blocks: BlockManager) -> int:
        """Pages of the first page group that others hold, or that come before those."""
        return sum(page < 0 or blocks.references(page) > 0 for page in self.pages[0])

    def num_full_pages(self, page_size: int) -> tuple[int, int]:
        """Leading full pages on the device: (in all page groups, in any)."""
        most = self.num_tokens // page_size
        found = [min(len(pages), most) for pages in self.pages]
        return min(found), max(found)


@dataclasses.dataclass(frozen=True, slots=True)
class PrefixMatcher:
    """Finds the longest cached prefix of a waiting or swapped sequence.

    Args:
        groups: the page groups, with the pages of the device.
        host: pages of the host.
        caching: whether pages of other requests may be used.
    """

    groups: GroupPages
    host: HostPool
    caching: bool

    @property
    def blocks(self) -> BlockManager:
        """Pages of the device."""
        return self.groups.blocks

    def match(self, sequence: Sequence) -> PrefixMatch | None:
        """The match, with no reference taken; None if the sequence waits for pending pages.

        A sample of a prompt waits until the first sample has computed the prompt. Any sequence
        waits for its next full page while a running sequence is about to compute it. Both can start
        in the step that computes what they wait for, because a step writes all KV of a layer before
        it reads any.

        A cached prefix serves a sequence only if the pages that the next token reaches are cached
        in every group.
        """
        if sequence.status is SequenceStatus.SWAPPED:
            return self._match_swapped(sequence)
        leader = sequence.leader
        fresh = leader is not sequence and not sequence.output_token_ids
        if fresh and leader.status is SequenceStatus.RUNNING:
            if min(leader.num_stored, leader.num_computed + 1) < len(sequence.prompt_token_ids):
                return None
            forked = self._fork(sequence, leader)
            if forked is not None:
                return forked
        return self._match_cached(sequence)

    def match_full_pages(self, sequence: Sequence) -> PrefixMatch:
        """The match without a partial page, while no sequence runs.

        Of layers with windows it may have pages that a longer match does not reach.
        """
        found = self._match_cached(sequence, partial=False)
        assert found is not None, "only running sequences have pending pages"
        return found

    def _match_cached(self, sequence: Sequence, *, partial: bool = True) -> PrefixMatch | None:
        """The match in the prefix cache; None if the sequence waits for pending pages.

        ``partial`` says whether it may end with a partial page.
        """
        S, most = self.blocks.page_size, sequence.most_cached
        if not (self.caching and most):
            return self._matched([[] for _ in self.groups], 0, 0 if self.groups.states else None)
        if sequence.awaited is not None and self.blocks.is_pending(sequence.awaited):
            return None
        keys = self._keys(sequence)[: most // S]
        longest = min(group.longest(keys) for group in self.groups)
        end = self.groups.longest(keys, longest, sequence.num_tokens)
        sequence.awaited = None
        for number in (longest, end):
            if number < len(keys) and self.blocks.is_pending(keys[number]):
                sequence.awaited = keys[number]
                return None
        num_states = None
        if self.groups.states is not None:
            num_states = self.groups.states.longest(sequence, keys, end)
            if num_states is None:
                return None
            partial = False  # what follows the state is computed again
        last_pages, count = self._partial_pages(sequence, end) if partial else ([], 0)
        tokens = end * S + count
        position = min(tokens, sequence.num_tokens - 1)
        held = [group.cached(keys[:end], group.first_page(position)) for group in self.groups]
        assert all(len(found) == end for found in held)
        assert tokens <= most
        for found, last in zip(held, last_pages, strict=False):
            found.append(last)
        return self._matched(held, tokens, None if num_states is None else num_states * S)

    def _matched(
        self, pages: list[list[int]], num_tokens: int, num_computed: int | None = None
    ) -> PrefixMatch:
        return PrefixMatch(pages, [[] for _ in self.groups], num_tokens, num_computed)

    def _partial_pages(self, sequence: Sequence, number: int) -> tuple[list[int], int]:
        """Pages of this number, of each page group, and the leading tokens that all of them hold;
        no pages if there are none in some group."""
        start = number * self.blocks.page_size
        stop = min(start + self.blocks.page_size, sequence.most_cached)
        if start >= stop:
            return [], 0
        following = block_bytes(sequence.token_array(start, stop))
        pages, counts = [], []
        for group in self.groups:
            parent = group_key(sequence.hashes.parent(number), group.index)
            found = self.blocks.match_partial_page(parent, following)
            if found is None:
                return [], 0
            pages.append(found[0])
            counts.append(found[1])
        return pages, min(counts)

    def _fork(self, sequence: Sequence, leader: Sequence) -> PrefixMatch | None:
        """The pages of a running sibling that has the whole prompt; None if it has released some
        that are not cached any more, or has states, which are past the prompt."""
        if self.groups.states is not None:
            return None
        length = len(sequence.prompt_token_ids)
        full = length // self.blocks.page_size
        held = []
        for group in self.groups:
            start, stop = group.first_page(length - 1), group.pages_for(length)
            found = leader.pages[group.index][start:stop]
            if -1 in found:
                keys = group.keys(self._keys(sequence)[:full]) if self.caching else []
                for number in range(start, stop):
                    if found[number - start] < 0:
                        page = self.blocks.find(keys[number]) if number < len(keys) else None
                        if page is None:
                            return None
                        found[number - start] = page
            held.append([-1] * start + found)
        sequence.hashes.copy_from(leader.hashes, full)
        return self._matched(held, length)

    def _match_swapped(self, sequence: Sequence) -> PrefixMatch | None:
        """The saved pages and the saved state; where some are missing, the saved pages that remain
        or what the prefix cache has. None if the present step computes the state."""
        S, num_saved = self.blocks.page_size, sequence.num_saved
        position = min(num_saved, sequence.num_tokens - 1)
        held, slots = [], []
        for group in self.groups:
            found, saved = self._saved(sequence, group, group.first_page(position))
            held.append(found)
            slots.append(saved)
        saved = min(len(pages) + len(rest) for pages, rest in zip(held, slots, strict=True)) * S
        state, states = sequence.saved_state, self.groups.states
        needs_all = state is not None or not all(group.endless for group in self.groups)
        if saved < num_saved and needs_all:
            return self._match_cached(sequence)  # it cannot go on where it was
        if state is None or states is None:
            return PrefixMatch(held, slots, min(saved, num_saved))
        end = state.num_computed // S
        if end and not state.has_page:
            page = states.pool.find(self._keys(sequence)[end - 1])
            if page is None:
                return self._match_cached(sequence)
            if states.pool.is_new(page):
                return None
        return PrefixMatch(held, slots, num_saved, state.num_computed, state)

    def _saved(
        self, sequence: Sequence, group: PageGroup, start: int
    ) -> tuple[list[int], list[int]]:
        """(device pages, -1 before number ``start``, host slots of those after them) of a swapped
        sequence, in one page group."""
        full = sequence.num_saved // self.blocks.page_size
        keys = self._keys(sequence)[:full] if self.caching else []
        pages = [-1] * start + group.cached(keys, start)[start:]
        slots = []
        for number in range(len(pages), group.pages_for(sequence.num_saved)):
            slot = sequence.host_slots.get((group.index, number))
            if slot is None and number < len(keys):
                slot = self.host.find(group_key(keys[number], group.index))
            if slot is None:
                break
            slots.append(slot)
        return pages, slots

    def _keys(self, sequence: Sequence) -> list[bytes]:
        hashes, S = sequence.hashes, self.blocks.page_size
        if len(hashes.keys) < sequence.num_known // S:
            start = len(hashes.keys) * S
            hashes.extend(sequence.token_array(start, sequence.num_known), start)
        return hashes.keys
