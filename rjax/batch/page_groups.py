"""Page groups: layers that share the pages of a sequence, divided by their sliding windows.

All pages come from one pool of ``num_pools`` K and V arrays. A page holds S tokens of the layers of
one group, at most one layer for each array. A sequence has one page table a group. A group whose
layers have a window keeps only the pages that the next token can reach, so its other pages go back
to the pool, which all groups allocate from (as vLLM's hybrid KV cache manager does).
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable
from typing import NamedTuple

_MAX_GROUPS = 8  # page tables of a sequence

STATES = -1
"""In place of a page group: the layers without KV, which have a state instead."""


class GroupKind(NamedTuple):
    """The page groups first to stop - 1, whose KV lives equally long.

    Attributes:
        window: sliding window of their layers, in tokens; None without end.
        first, stop: numbers of the groups.
    """

    window: int | None
    first: int
    stop: int


@dataclasses.dataclass(frozen=True, slots=True)
class PageGroups:
    """The page groups of a model.

    Attributes:
        windows: sliding window of each group, in tokens; None without end, for full attention.
            Groups with equal windows are neighbours, and the first group is the only one with its
            window.
        layers: (group, index of its K and V arrays) of each layer; (STATES, index of its arrays) of
            a layer with a state in place of KV.
    """

    windows: tuple[int | None, ...]
    layers: tuple[tuple[int, int], ...]

    @property
    def num_pools(self) -> int:
        """Number of K arrays of the pool, and of V arrays: the layers of the largest group."""
        return 1 + max(pool for group, pool in self.layers if group != STATES)

    @property
    def num_state_layers(self) -> int:
        """Number of layers with a state in place of KV."""
        return sum(group == STATES for group, _ in self.layers)

    @property
    def num_tables(self) -> int:
        """Page tables of a sequence: that of its states, if there are any, is the last."""
        return len(self.windows) + (self.num_state_layers > 0)

    @property
    def kinds(self) -> tuple[GroupKind, ...]:
        """The groups with equal windows, in the order of the groups."""
        kinds, first = [], 0
        for window, members in itertools.groupby(self.windows):
            stop = first + len(list(members))
            kinds.append(GroupKind(window, first, stop))
            first = stop
        return tuple(kinds)

    def layers_of(self, window: int | None) -> int:
        """Number of layers with this window, without those that have a state."""
        of_layers = (group for group, _ in self.layers if group != STATES)
        return sum(self.windows[group] == window for group in of_layers)


def one_group(num_layers: int) -> PageGroups:
    """All layers in one group without end."""
    return PageGroups((None,), tuple((0, layer) for layer in range(num_layers)))


def with_states(groups: PageGroups, has_state: tuple[bool, ...]) -> PageGroups:
    """The page groups of a model with states, from those of its layers with KV.

    has_state: whether each layer of the model has a state in place of KV.
    """
    with_kv, state = iter(groups.layers), itertools.count()
    layers = [(STATES, next(state)) if found else next(with_kv) for found in has_state]
    return PageGroups(groups.windows, tuple(layers))


def page_groups(
    windows: tuple[int | None, ...], *, page_size: int, max_model_len: int
) -> PageGroups:
    """The page groups of a model.

    All layers share one group without end if no window is shorter than a sequence, or if a sequence
    of full length takes no less memory in several groups: all are as large as the largest, and a
    smaller one wastes memory.

    Args:
        windows: sliding window of each layer with KV, in tokens; None for full attention.
        page_size: tokens a page.
        max_model_len: tokens of the longest sequence.
    """
    kinds: dict[int | None, list[int]] = {}
    for layer, window in enumerate(windows):
        short = window is not None and window < max_model_len
        kinds.setdefault(window if short else None, []).append(layer)
    if kinds.keys() <= {None}:
        return one_group(len(windows))
    first = None if None in kinds else min(kinds, key=lambda window: len(kinds[window]))
    order = sorted(kinds, key=lambda window: (window != first, window or 0))

    def divided(size: int) -> tuple[int | None, ...]:
        return tuple(
            window for window in order for _ in range(math.ceil(len(kinds[window]) / size))
        )

    def pages(found: Iterable[int | None]) -> int:
        return pages_held(found, max_model_len, page_size)

    sizes = range(len(kinds[first]), len(windows) + 1)
    sizes = [size for size in sizes if len(divided(size)) <= max(_MAX_GROUPS, len(kinds))]
    size = min(sizes, key=lambda size: (size * pages(divided(size)), len(divided(size))))
    if size * pages(divided(size)) >= len(windows) * pages([None]):
        return one_group(len(windows))
    found = divided(size)
    layers = {}
    for window in order:
        for number, layer in enumerate(kinds[window]):
            layers[layer] = (found.index(window) + number // size, number % size)
    return PageGroups(found, tuple(layers[layer] for layer in range(len(windows))))


def first_page(position: int, window: int | None, page_size: int) -> int:
    """Number of the first page that a query at ``position`` reaches."""
    if window is None:
        return 0
    return max(0, position - window + 1) // page_size


def pages_held(windows: Iterable[int | None], tokens: int, page_size: int) -> int:
    """Pages that a sequence of ``tokens`` tokens needs at most, computed token by token.

    Args:
        windows: sliding window of each page group, in tokens; None for full attention.
        tokens: number of tokens of the sequence.
        page_size: tokens a page.
    """
    every = -(-tokens // page_size)
    return sum(
        every if window is None else min(every, -(-(window - 1) // page_size) + 1)
        for window in windows
    )


def tokens_held(windows: Iterable[int | None], pages: int, page_size: int) -> int:
    """Tokens of the longest sequence that needs no more than ``pages`` pages.

    Without full attention any length may fit; the answer is then ``pages`` pages.
    """
    windows, low, high = tuple(windows), 0, pages
    while low < high:  # pages of one group
        middle = (low + high + 1) // 2
        if pages_held(windows, middle * page_size, page_size) <= pages:
            low = middle
        else:
            high = middle - 1
    return low * page_size
