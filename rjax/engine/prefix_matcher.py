"""Finds the KV that exists for the leading tokens of a sequence."""

import dataclasses

from rjax.batch.page_groups import first_page
from rjax.batch.page_hash import block_bytes, group_key
from rjax.batch.sequence import Sequence, SequenceStatus
from rjax.engine.block_manager import BlockManager
from rjax.engine.host_pool import HostPool
from rjax.engine.window_pages import WindowPages


@dataclasses.dataclass(slots=True)
class PrefixMatch:
    """KV of the leading tokens of a sequence.

    Attributes:
        pages: full pages on the device, in order.
        partial_page: a device page whose first tokens follow those of ``pages``, or None.
        host_slots: host slots of the pages after ``pages``; excludes a ``partial_page``.
        num_tokens: leading tokens of the sequence whose KV all these hold.
        window_pages: device pages of each page group with a window, in order; -1 for those that the
            next token does not reach. A partial page, if there is one, is the last of them.
        window_slots: host slots, in each page group with a window, of the pages after
            ``window_pages``.
    """

    pages: list[int]
    partial_page: int | None = None
    host_slots: list[int] = dataclasses.field(default_factory=list)
    num_tokens: int = 0
    window_pages: list[list[int]] = dataclasses.field(default_factory=list)
    window_slots: list[list[int]] = dataclasses.field(default_factory=list)

    def without_partial_page(self, page_size: int) -> "PrefixMatch":
        """The same match up to its last full page."""
        full = self.num_tokens // page_size
        windows = [pages[:full] for pages in self.window_pages]
        return PrefixMatch(self.pages, num_tokens=full * page_size, window_pages=windows)

    def num_shared_pages(self, blocks: BlockManager) -> int:
        """Pages of the first page group that others hold, or that come before those."""
        held = self.pages + ([] if self.partial_page is None else [self.partial_page])
        if not held and self.window_pages:
            held = self.window_pages[0]
        return sum(page < 0 or blocks.references(page) > 0 for page in held)

    def num_full_pages(self, page_size: int, *, has_full: bool) -> tuple[int, int]:
        """Leading full pages on the device: (in all page groups, in any).

        Args:
            page_size: tokens a page.
            has_full: whether there is a page group without a window.
        """
        most = self.num_tokens // page_size
        found = [min(len(pages), most) for pages in self.window_pages]
        found += [len(self.pages)] if has_full else []
        return min(found), max(found)


@dataclasses.dataclass(frozen=True, slots=True)
class PrefixMatcher:
    """Finds the longest cached prefix of a waiting or swapped sequence.

    Args:
        blocks: pages of the device.
        host: pages of the host.
        caching: whether pages of other requests may be used.
        windows: pages of layers with windows; None without such layers.
    """

    blocks: BlockManager
    host: HostPool
    caching: bool
    windows: WindowPages | None = None

    def match(self, sequence: Sequence) -> PrefixMatch | None:
        """The match, with no reference taken; None if the sequence waits for pending pages.

        A sample of a prompt waits until the first sample has computed the prompt. Any sequence
        waits for its next full page while a running sequence is about to compute it. Both can start
        in the step that computes what they wait for, because a step writes all KV of a layer before
        it reads any.

        With windows, a cached prefix serves a sequence only if its last pages, which the next token
        reaches, are cached for every window.
        """
        if sequence.status is SequenceStatus.SWAPPED:
            return self._match_swapped(sequence)
        leader = sequence.leader
        fresh = leader is not sequence and not sequence.output_token_ids
        if fresh and leader.status is SequenceStatus.RUNNING:
            if self.windows is None:
                return _fork(sequence, leader, self.blocks.page_size)
            if leader.num_stored < len(sequence.prompt_token_ids):
                return None
            forked = self._fork_windows(sequence, leader)
            if forked is not None:
                return forked
        S, most = self.blocks.page_size, sequence.most_cached
        if not (self.caching and most):
            return PrefixMatch([], window_pages=[[] for _ in range(len(self.windows or ()))])
        if sequence.awaited is not None and self.blocks.is_pending(sequence.awaited):
            return None
        keys = self._keys(sequence)[: most // S]
        if self.windows is not None:
            return self._match_windows(sequence, keys, self.windows)
        pages = self.blocks.match(keys)
        sequence.awaited = None
        if len(pages) < len(keys) and self.blocks.is_pending(keys[len(pages)]):
            sequence.awaited = keys[len(pages)]
            return None
        cached = len(pages) * S
        following = sequence.token_array(cached, min(cached + S, most))
        if following.size:
            parent = sequence.hashes.parent(len(pages))
            found = self.blocks.match_partial_page(parent, block_bytes(following))
            if found is not None:
                return PrefixMatch(pages, partial_page=found[0], num_tokens=cached + found[1])
        return PrefixMatch(pages, num_tokens=cached)

    def _match_windows(
        self, sequence: Sequence, keys: list[bytes], windows: WindowPages
    ) -> PrefixMatch | None:
        """The match for a model with windows; None if the sequence waits for pending pages."""
        S, most = self.blocks.page_size, sequence.most_cached
        pages = self.blocks.match(keys) if windows.first_group else []
        longest = len(pages) if windows.first_group else len(keys)
        first = windows.first_group

        def page(i: int, number: int) -> int | None:
            return self.blocks.find(group_key(keys[number], first + i))

        end = windows.longest(
            longest, sequence.num_tokens, lambda i, number: page(i, number) is not None
        )
        sequence.awaited = None
        for number in (longest, end):
            if number < len(keys) and self.blocks.is_pending(keys[number]):
                sequence.awaited = keys[number]
                return None
        partial, count = self._partial_pages(sequence, end, windows)
        tokens = end * S + count
        held = []
        for i, window in enumerate(windows.windows):
            start = first_page(min(tokens, sequence.num_tokens - 1), window, S)
            found = [page(i, number) for number in range(min(start, end), end)]
            assert None not in found
            held.append([-1] * min(start, end) + [p for p in found if p is not None])
        for found, last in zip(held, partial[first:], strict=False):
            found.append(last)
        assert tokens <= most
        return PrefixMatch(
            pages[:end],
            partial_page=partial[0] if first and partial else None,
            num_tokens=tokens,
            window_pages=held,
        )

    def _partial_pages(
        self, sequence: Sequence, number: int, windows: WindowPages
    ) -> tuple[list[int], int]:
        """Pages of this number, of each page group, and the leading tokens that all of them hold;
        no pages if there are none in some group."""
        start = number * self.blocks.page_size
        stop = min(start + self.blocks.page_size, sequence.most_cached)
        following = block_bytes(sequence.tokens(start, stop))
        pages, counts = [], []
        for group in range(windows.first_group + len(windows) if following else 0):
            parent = group_key(sequence.hashes.parent(number), group)
            found = self.blocks.match_partial_page(parent, following)
            if found is None:
                return [], 0
            pages.append(found[0])
            counts.append(found[1])
        return pages, min(counts, default=0)

    def _fork_windows(self, sequence: Sequence, leader: Sequence) -> PrefixMatch | None:
        """The pages of a running sibling that has the whole prompt; None if it has given back some
        that are not cached any more."""
        windows, S = self.windows, self.blocks.page_size
        assert windows is not None
        length = len(sequence.prompt_token_ids)
        full, stop = length // S, -(-length // S)
        keys = self._keys(sequence) if self.caching else []
        held = []
        for window, (group, pages) in zip(windows.windows, windows.groups(leader), strict=True):
            start = first_page(length - 1, window, S)
            found = [-1] * start
            for number in range(start, stop):
                page = pages[number]
                if page < 0 and number < min(full, len(keys)):
                    page = self.blocks.find(group_key(keys[number], group))
                if page is None or page < 0:
                    return None
                found.append(page)
            held.append(found)
        sequence.hashes.copy_from(leader.hashes, full)
        partial_page = leader.pages[full] if length % S and windows.first_group else None
        return PrefixMatch(
            leader.pages[:full], partial_page=partial_page, num_tokens=length, window_pages=held
        )

    def _match_swapped(self, sequence: Sequence) -> PrefixMatch | None:
        if self.windows is not None:
            return self._match_swapped_windows(sequence, self.windows)
        pages, slots = self._saved(sequence, 0, 0)
        S = self.blocks.page_size
        saved = min((len(pages) + len(slots)) * S, sequence.num_saved)
        return PrefixMatch(pages, host_slots=slots, num_tokens=saved)

    def _match_swapped_windows(
        self, sequence: Sequence, windows: WindowPages
    ) -> PrefixMatch | None:
        S, first = self.blocks.page_size, windows.first_group
        pages, slots = self._saved(sequence, 0, 0) if first else ([], [])
        end = len(pages) + len(slots) if first else -(-sequence.num_saved // S)
        position = min(sequence.num_saved, sequence.num_tokens - 1)
        held, window_slots = [], []
        for i, window in enumerate(windows.windows):
            start = first_page(position, window, S)
            found, saved = self._saved(sequence, first + i, start)
            if start + len(found) + len(saved) < -(-sequence.num_saved // S):
                end = 0  # it cannot go on where it was
            held.append([-1] * start + found)
            window_slots.append(saved)
        if end * S < sequence.num_saved:  # as if nothing had been saved
            if not self.caching:
                return PrefixMatch([], window_pages=[[] for _ in windows.windows])
            keys = self._keys(sequence)[: sequence.most_cached // S]
            return self._match_windows(sequence, keys, windows)
        return PrefixMatch(
            pages,
            host_slots=slots,
            num_tokens=sequence.num_saved,
            window_pages=held,
            window_slots=window_slots,
        )

    def _saved(self, sequence: Sequence, group: int, start: int) -> tuple[list[int], list[int]]:
        """(device pages from number ``start`` on, host slots of those after them) of a swapped
        sequence, in one page group."""
        S = self.blocks.page_size
        full, rest = divmod(sequence.num_saved, S)
        keys = self._keys(sequence)[:full] if self.caching else []
        keys = [group_key(key, group) for key in keys]
        pages = self.blocks.match(keys[start:])
        slots = []
        for number in range(start + len(pages), full + bool(rest)):
            slot = sequence.host_slots.get((group, number))
            if slot is None and number < len(keys):
                slot = self.host.find(keys[number])
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


def _fork(sequence: Sequence, leader: Sequence, page_size: int) -> PrefixMatch | None:
    """The pages of a running sibling that has the whole prompt; None if it has not."""
    length = len(sequence.prompt_token_ids)
    if leader.num_stored < length:
        return None
    full = length // page_size
    sequence.hashes.copy_from(leader.hashes, full)
    partial_page = leader.pages[full] if length % page_size else None
    return PrefixMatch(leader.pages[:full], partial_page=partial_page, num_tokens=length)
